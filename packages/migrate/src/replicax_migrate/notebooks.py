"""Ports Jupyter notebooks: joins the code cells to one script, and splits its port.

In the script, `pass  # %% 3` begins the third cell, and `pass  # IPython: %cd x` stands
for a command of IPython. A cell that begins with `%%writefile x.py` is a separate
script.
"""

import ast
import bisect
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import libcst as cst

from replicax_migrate.port import Ported, port
from replicax_migrate.script import MARK, Finding
from replicax_migrate.tables import MESSAGES

__all__ = ["in_cells", "port_notebook", "script_of"]

_CELL = "pass  # %% "
_COMMAND = "pass  # IPython: "
_IPYTHON = re.compile(r"\s*([%!?].*|[\w, .]+=\s*[%!].*|[\w.]+\?\??)")
_IMPORT = re.compile(rf"{_COMMAND}.*\b(import|from) tensorflow\b")
"""An import in a cell that IPython does not run as Python, such as in `%%bash`."""
_FILE = re.compile(r"%%(writefile|file)\s+\S+\.py\s*")
"""The first line of a cell that IPython writes to a file as a script."""
_PYTHON_CELLS = ("%%time", "%%timeit", "%%capture", "%%prun")
"""First lines of cells whose other lines are Python."""


def port_notebook(source: bytes) -> Ported:
    r"""Port the code of a notebook, like `port` does for a script.

    Text, outputs and IPython's commands stay. If the port joins code of several cells
    to one block, such as `with strategy.scope():`, the first cell gets the block.

    Args:
        source: The text of an .ipynb file.

    Returns:
        The ported text, and the findings with the lines of their cells.

    Raises:
        ValueError: If the text is not a notebook, or a cell is neither Python nor
            commands of IPython.

    Example:
        >>> import json
        >>> code = "import tensorflow as tf\ntf.abs(x)"
        >>> cell = {"cell_type": "code", "source": code}
        >>> ported = port_notebook(json.dumps({"cells": [cell]}).encode())
        >>> print(json.loads(ported.source)["cells"][0]["source"])
        import replicax as rx  # Before keras: it settles the backend.
        import keras
        keras.ops.abs(x)
    """
    notebook = _read(source)
    script = _script(notebook)
    try:
        ported = port(script.encode())
    except cst.ParserSyntaxError as error:
        finding = in_cells([Finding(error.raw_line, "", error.message)], script)[0]
        raise ValueError(f"{finding.place}: {error.message}") from error
    text_cells = [
        Finding(number, line.removeprefix(_COMMAND)[:70], MESSAGES["cell_of_text"])
        for number, line in enumerate(script.splitlines(), 1)
        if _IMPORT.match(line)
    ]
    if (text := ported.source.decode()) != script:
        _set_code(notebook, _tensorflow_last(text))
    left = [*in_cells([*ported.left, *text_cells], script)]
    notes = [*in_cells(ported.notes, script)]
    for number, cell in enumerate(_code_cells(notebook), 1):
        if (file := _ported_file(cell, number)) is not None:
            left = [*(item for item in left if item.cell != number), *file.left]
            notes += file.notes
    if notebook != _read(source):
        indent = re.match(r"\{\r?\n( *)", source.decode())
        width = len(indent[1]) if indent else None
        end = "\n" if source.endswith(b"\n") else ""
        source = (
            f"{json.dumps(notebook, indent=width, ensure_ascii=False)}{end}".encode()
        )
    return Ported(
        source=source,
        left=tuple(sorted(left, key=_position)),
        notes=tuple(sorted(notes, key=_position)),
    )


def _position(finding: Finding) -> tuple[int, Finding]:
    return finding.cell, finding


def _ported_file(cell: dict[str, Any], number: int) -> Ported | None:
    """Port the script in a cell with `%%writefile`; None for other cells."""
    first, _, code = "".join(cell["source"]).partition("\n")
    try:
        ported = port(code.encode()) if _FILE.fullmatch(first) else None
    except cst.ParserSyntaxError:
        return None
    if ported is None:
        return None
    _set_source(cell, f"{first}\n{ported.source.decode()}")
    moved = [
        tuple(replace(item, cell=number, line=item.line + 1) for item in findings)
        for findings in (ported.left, ported.notes)
    ]
    return Ported(source=ported.source, left=moved[0], notes=moved[1])


def script_of(source: bytes) -> str:
    """The code of a notebook as one script; raise ValueError for other texts."""
    return _script(_read(source))


def in_cells(findings: Iterable[Finding], script: str) -> tuple[Finding, ...]:
    """Convert line numbers of the joined script to numbers of cells and their lines."""
    lines = script.splitlines()
    starts = [n for n, line in enumerate(lines, 1) if line.startswith(_CELL)]
    converted = []
    for finding in sorted(findings):
        cell = max(bisect.bisect_left(starts, finding.line), 1)
        line = max(finding.line - starts[cell - 1], 1)
        converted.append(replace(finding, cell=cell, line=line))
    return tuple(converted)


def _read(source: bytes) -> dict[str, Any]:
    notebook = json.loads(source)
    if not isinstance(notebook, dict) or "cells" not in notebook:
        raise ValueError("the notebook has no cells: save it in format 4")
    return notebook


def _code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _script(notebook: dict[str, Any]) -> str:
    parts = []
    for number, cell in enumerate(_code_cells(notebook), 1):
        code = "".join(cell["source"])
        parts += [f"{_CELL}{number}", *([_as_python(code)] if code else [])]
    return "\n".join([*parts, ""])


def _as_python(code: str) -> str:
    """The code of a cell, with commands of IPython as `pass`, and without indent."""
    try:
        ast.parse(code)
    except SyntaxError:
        pass
    else:
        return code
    if indent := re.match(r"[ \t]+", code):
        code = re.sub(f"^{indent[0]}", "", code, flags=re.MULTILINE)
    is_text_cell = code.startswith("%%") and not code.startswith(_PYTHON_CELLS)
    lines, blanks, is_continued = [], "", False
    for line in code.split("\n"):
        if is_text_cell or is_continued or _IPYTHON.fullmatch(line):
            if not is_text_cell and not is_continued:
                blanks = line[: -len(line.lstrip())]
            indent = blanks if line.startswith(blanks) else ""
            is_continued = line.endswith("\\")
            line = f"{indent}{_COMMAND}{line.removeprefix(indent)}"
        lines.append(line)
    return "\n".join(lines)


def _set_code(notebook: dict[str, Any], script: str) -> None:
    codes: dict[int, list[str]] = {}
    number = 1  # The port may insert imports above the first cell.
    for line in script.splitlines(keepends=True):
        if line.startswith(_CELL):
            number = int(line.removeprefix(_CELL))
        elif not line.lstrip().startswith(_CELL):
            blanks, command, rest = line.partition(_COMMAND)
            is_command = command and not blanks.strip()
            kept = f"{blanks}{rest}" if is_command else line
            codes.setdefault(number, []).append(kept)
    for number, cell in enumerate(_code_cells(notebook), 1):
        _set_source(cell, "".join(codes.get(number, [])).removesuffix("\n"))


def _tensorflow_last(script: str) -> str:
    """Move imports of TensorFlow, with their marks, below the cell's other imports.

    If TensorFlow is not installed, the other imports then run before the error.
    """
    lines = script.splitlines(keepends=True)
    place: int | None = None  # The line below the other imports of this cell.
    for node in reversed(ast.parse(script).body):
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        if lines[start].startswith(_CELL):
            place = None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if not re.search(r"\btensorflow", ast.unparse(node)):
                place = place or end
            elif place is not None:
                while lines[start - 1].startswith(MARK):
                    start -= 1
                lines[start:place] = lines[end:place] + lines[start:end]
                place -= end - start
    return "".join(lines)


def _set_source(cell: dict[str, Any], text: str) -> None:
    is_list = isinstance(cell["source"], list)
    cell["source"] = text.splitlines(keepends=True) if is_list else text
