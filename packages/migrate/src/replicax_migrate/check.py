"""Runs a ported script up to its first training step, and reports what fails there."""

import ast
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicax_migrate.script import Finding
from replicax_migrate.tables import MESSAGES

__all__ = ["check"]

_NO_STEP = "ended without a training step"
_PLAN = ("-m", "replicax.planning", "--topology", "cpu:2", "--default-strategy")
# With filtering JAX adds lines to errors' texts.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_FILTERING": "off"}
_NOT_COVERED = re.compile(r"variables of (\w+) live apart from its replicas")


def check(
    path: Path,
    original: str,
    ported: Mapping[Path, str],
    arguments: Sequence[str],
    limit_seconds: float,
) -> Finding | None:
    """Run a ported script in a process under the dry run of `replicax plan`.

    Args:
        path: Where the original is. Modules beside it can be imported.
        original: The original's text, for its line numbers.
        ported: The ported texts of the original, and of modules beside it.
        arguments: What the script gets on its command line.
        limit_seconds: A script that takes longer is ended, and reported.

    Returns:
        The error that ended the script, by line of the original, or the fact that it
        ended without a training step. None if it reached a training step, or if it is
        a module that another of the ported scripts imports.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / path.name
        for other, text in ported.items():
            if other.parent == path.parent:
                (Path(folder) / other.name).write_text(text, "utf-8")
        parts = [str(path.resolve().parent), os.environ.get("PYTHONPATH")]
        search = os.pathsep.join(filter(None, parts))
        try:
            done = subprocess.run(
                [sys.executable, *_PLAN, str(script), *arguments],
                env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": search},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=limit_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _of_all(original, MESSAGES["no_step"].format(limit=limit_seconds))
        if done.returncode == 0:
            return None
        if _NO_STEP in done.stderr:
            others = (text for other, text in ported.items() if other != path)
            is_module = any(_imports(text, path.stem) for text in others)
            return None if is_module else _of_all(original, MESSAGES["untrained"])
        line, error = _failure(done.stderr, str(script))
    if strategy := _NOT_COVERED.search(error):
        error = MESSAGES["not_covered"].format(strategy=strategy[1])
    number = _original_line(original, ported[path], line)
    source = "".join(original.splitlines()[number - 1 : number]).strip()
    return Finding(number, source[:70], error)


def _of_all(original: str, reason: str) -> Finding:
    return Finding(1, original.partition("\n")[0][:70], reason)


def _imports(text: str, module: str) -> bool:
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return any(module in name.split(".") for name in names)


def _failure(output: str, script: str) -> tuple[int, str]:
    """The script's line in the last traceback, and the error's text in one line."""
    _, _, last = output.rpartition("Traceback (most recent call last):")
    frames = re.findall(rf'File "{re.escape(script)}", line (\d+)', last)
    line = int(frames[-1]) if frames else 1
    texts = [text for text in last.splitlines() if text and text[0] != " "]
    error = " ".join(texts).partition("Arguments received")[0].strip()
    return line, error[:400] or output.strip().rpartition("\n")[2]


def _original_line(original: str, ported: str, line: int) -> int:
    """Map a line number of the ported script to one of the original, by their diff."""
    before, after = original.splitlines(), ported.splitlines()
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    for _, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        if b_start <= line - 1 < b_end:
            return min(a_start + line - 1 - b_start, max(a_end - 1, a_start)) + 1
    return line
