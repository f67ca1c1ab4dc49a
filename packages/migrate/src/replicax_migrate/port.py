"""`port` maps the text of a script to the ported text and a report."""

from dataclasses import dataclass

import libcst as cst

from replicax_migrate import (
    compile_calls,
    files,
    functional,
    gradient_sums,
    identifiers,
    imports,
    keras_calls,
    layer_calls,
    logits,
    lookups,
    members,
    methods,
    pipelines,
    scopes,
    sessions,
    statements,
    tracing,
    training,
)
from replicax_migrate.rewrite import Rewriter
from replicax_migrate.script import MARK, Finding, Script

__all__ = ["Ported", "port"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ported:
    """A ported script.

    Attributes:
        source: The ported text, in the encoding of the original.
        left: Findings of code to port by hand, by line of the original.
        notes: Findings of ported code that behaves differently.
    """

    source: bytes
    left: tuple[Finding, ...]
    notes: tuple[Finding, ...]


def port(source: bytes) -> Ported:
    r"""Port a `tf.distribute` script to replicax, Keras 3 and Grain.

    The function neither runs nor imports the script. Comments `# replicax: <reason>` in
    the ported text mark code to port by hand. A second port changes nothing.

    Args:
        source: The text of a Python module, in its encoding.

    Returns:
        The ported text and the findings.

    Raises:
        libcst.ParserSyntaxError: If the text is not Python.
        SyntaxError: If the text is not in its declared encoding, by default UTF-8.

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
    if not imports.uses_tensorflow(module):
        return Ported(source=source, left=tuple(marked), notes=())
    script = Script(module)
    ported = _ported_module(script).code.encode(module.encoding)
    return _result(script.findings, ported, marked)


def _ported_module(script: Script) -> cst.Module:
    for plan in _PASSES:
        script.edits |= plan(script)
    for report in _REPORTS:
        report(script)
    changed = script.module.visit(Rewriter(script))
    changed = imports.ported_imports(script, changed)
    if script.names.assumes_tensorflow:
        line = min((script.line(s) for s in script.module.body), default=1)
        reason = "no import binds `tf`: the port assumes TensorFlow"
        script.findings.add(Finding(line, "tf", reason, is_left=False))
    return changed


_PASSES = (
    imports.plan_kept_imports,
    tracing.plan_traced,
    statements.plan_servers,
    pipelines.plan_pipelines,
    lookups.plan_lookups,
    statements.plan_settings,
    tracing.plan_randomness,
    sessions.plan_sessions,
    training.plan_minimize,
    training.plan_compiled_loss,
    training.plan_logs,
    gradient_sums.plan_gradient_sums,
    logits.plan_logits,
    files.plan_files,
    keras_calls.plan_arguments,
    identifiers.plan_identifiers,
    compile_calls.plan_labels,
    scopes.plan_scopes,
    methods.plan_resets,
    layer_calls.plan_layer_calls,
)
"""The analysis passes, in order: a pass sees the edits of earlier passes."""

_REPORTS = (
    imports.report_rebound,
    members.report_overridden,
    training.report_trainable,
    functional.report_functional,
    layer_calls.report_layers,
)
"""They report code that trains to other numbers after the port without an error."""


def _result(findings: set[Finding], source: bytes, marked: list[Finding]) -> Ported:
    reasons = {finding.reason for finding in findings}
    findings = {*findings, *(f for f in marked if f.reason not in reasons)}
    left = tuple(sorted(f for f in findings if f.is_left))
    notes = tuple(sorted(f for f in findings if not f.is_left))
    return Ported(source=source, left=left, notes=notes)


def _marked_lines(source: bytes, encoding: str) -> list[Finding]:
    """The findings that an earlier run wrote into the text as comments."""
    lines = source.decode(encoding).splitlines()
    marked = []
    for i, line in enumerate(lines, 1):
        if line.lstrip().startswith(MARK):
            reason = line.lstrip().removeprefix(MARK)
            below = lines[i].strip() if i < len(lines) else ""
            marked.append(Finding(i, below[:70], reason))
    return marked
