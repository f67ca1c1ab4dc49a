"""Ports one script: its text in, the ported text and a report out."""

from dataclasses import dataclass

import libcst as cst

from replicax.migrate.alignment import marked_lines, realigned
from replicax.migrate.functional import report_functional
from replicax.migrate.imports import find_retained, ported_imports, uses_tensorflow
from replicax.migrate.logits import plan_logits
from replicax.migrate.lookups import plan_lookups
from replicax.migrate.pipelines import plan_pipelines
from replicax.migrate.rewrite import Rewriter
from replicax.migrate.script import MARK, Finding, Script, walk
from replicax.migrate.sessions import plan_sessions
from replicax.migrate.statements import plan_servers, plan_settings
from replicax.migrate.summaries import plan_summaries
from replicax.migrate.tracing import find_traced, plan_randomness, report_branches
from replicax.migrate.training import plan_training

__all__ = ["Ported", "port"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ported:
    """A ported script.

    Attributes:
        source: Its text, encoded as the original was.
        left: What could not be ported, by line of the original.
        notes: What was ported and behaves differently, by line of the original.
    """

    source: bytes
    left: tuple[Finding, ...]
    notes: tuple[Finding, ...]


def port(source: bytes) -> Ported:
    r"""Port a `tf.distribute` script to replicax, Keras 3 and Grain.

    Nothing is run or imported of the script. What is left over is marked in the text
    with comments `# replicax: <reason>`. A ported script comes back as it is.

    Args:
        source: The text of a Python module, in its encoding.

    Returns:
        The ported text, and what there is to know about it.

    Raises:
        libcst.ParserSyntaxError: If the text is not Python.
        SyntaxError: If it is not in the encoding that it declares, or in UTF-8.

    Example:
        >>> ported = port(b"import tensorflow as tf\nx = tf.reduce_sum([1, 2])\n")
        >>> print(ported.source.decode())
        import replicax as rx  # Before keras: it settles the backend.
        import keras
        x = keras.ops.sum([1, 2])
        <BLANKLINE>
    """
    module = cst.parse_module(source)
    marked = _marked_lines(source, module.encoding)
    if not uses_tensorflow(module):
        return Ported(source=source, left=tuple(marked), notes=())
    aligned = cst.PartialParserConfig(encoding=module.encoding)
    script = Script(cst.parse_module(marked_lines(module.code), aligned))
    find_retained(script)
    find_traced(script)
    plan_servers(script)
    plan_pipelines(script)
    plan_lookups(script)
    plan_settings(script)
    plan_summaries(script)
    plan_randomness(script)
    plan_sessions(script)
    plan_training(script)
    plan_logits(script)
    _report_backend(script)
    report_branches(script)
    report_functional(script)
    changed = script.module.visit(Rewriter(script))
    changed = ported_imports(script, changed)
    if script.names.is_assumed:
        line = min((script.line(s) for s in script.module.body), default=1)
        what = "`tf` is nowhere imported: it is taken for TensorFlow"
        script.report.note(line, "tf", what)
    has_marks = script.module.code != module.code
    text = realigned(changed.code) if has_marks else changed.code
    return _ported(script, text.encode(module.encoding), marked)


def _report_backend(script: Script) -> None:
    """Report a script that asks for another backend of Keras."""
    for node in walk(script.module):
        if isinstance(node, cst.Assign) and "KERAS_BACKEND" in script.code(
            node.targets[0].target
        ):
            value = node.value
            if isinstance(value, cst.SimpleString) and value.evaluated_value != "jax":
                script.leave(node, "replicax needs Keras on its 'jax' backend")


def _ported(script: Script, source: bytes, marked: list[Finding]) -> Ported:
    findings = script.report.findings
    found = {f.reason for f in findings}
    left = {f for f in findings if f.is_left}
    left |= {f for f in marked if f.reason not in found}
    return Ported(
        source=source,
        left=tuple(sorted(left)),
        notes=tuple(sorted(f for f in findings if not f.is_left)),
    )


def _marked_lines(source: bytes, encoding: str) -> list[Finding]:
    """What an earlier run has marked, and nobody has done yet."""
    lines = source.decode(encoding).splitlines()
    found = []
    for i, line in enumerate(lines, 1):
        if line.lstrip().startswith(MARK):
            reason = line.lstrip().removeprefix(MARK)
            below = lines[i].strip() if i < len(lines) else ""
            found.append(Finding(i, below[:70], reason))
    return found
