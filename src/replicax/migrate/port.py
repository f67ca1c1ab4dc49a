"""Ports one script: its text in, the ported text and a report out.

Lines that are aligned with a bracket stay aligned where it moves. Form feeds, which are
blanks to Python, replace their indentation before the port; blanks up to the bracket's
new column replace the form feeds after it.
"""

import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from replicax.migrate.default_strategy import plan_eager_steps, plan_models
from replicax.migrate.files import plan_files
from replicax.migrate.functional import plan_operations, report_functional
from replicax.migrate.gradient_sums import plan_gradient_sums
from replicax.migrate.host import plan_lookups
from replicax.migrate.imports import find_retained, ported_imports, uses_tensorflow
from replicax.migrate.keras_calls import (
    plan_arguments,
    plan_identifiers,
    plan_metrics,
    plan_results,
)
from replicax.migrate.layer_calls import plan_input_shapes, plan_layer_calls
from replicax.migrate.logits import plan_logits
from replicax.migrate.methods import plan_resets
from replicax.migrate.optimizer_calls import report_shared_optimizers
from replicax.migrate.pipelines import plan_pipelines
from replicax.migrate.rewrite import Rewriter
from replicax.migrate.scopes import plan_scopes
from replicax.migrate.script import MARK, Finding, Script
from replicax.migrate.sessions import plan_sessions, plan_summaries
from replicax.migrate.statements import plan_servers, plan_settings
from replicax.migrate.tensor_arrays import plan_tensor_arrays
from replicax.migrate.tracing import (
    find_traced,
    plan_randomness,
    report_branches,
    report_gradients,
    report_updates,
)
from replicax.migrate.trainable import plan_trainable
from replicax.migrate.training import (
    plan_train_steps,
    plan_training,
    report_late_losses,
)
from replicax.migrate.tree import text_of

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

    The script is neither run nor imported. Comments `# replicax: <reason>` in the text
    mark what is left to do. A script that was ported before comes back unchanged.

    Args:
        source: The text of a Python module, in its encoding.

    Returns:
        The ported text and the findings.

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
    script = Script(cst.parse_module(_mark_alignment(module.code), aligned))
    find_retained(script)
    find_traced(script)
    plan_eager_steps(script)
    plan_servers(script)
    plan_pipelines(script)
    plan_lookups(script)
    plan_settings(script)
    plan_summaries(script)
    plan_tensor_arrays(script)
    plan_randomness(script)
    plan_sessions(script)
    plan_training(script)
    plan_train_steps(script)
    report_late_losses(script)
    plan_gradient_sums(script)
    plan_trainable(script)
    plan_logits(script)
    plan_files(script)
    plan_arguments(script)
    plan_identifiers(script)
    plan_metrics(script)
    plan_results(script)
    report_shared_optimizers(script)
    _report_backend(script)
    report_branches(script)
    report_gradients(script)
    report_updates(script)
    plan_models(script)
    plan_scopes(script)
    plan_resets(script)
    plan_layer_calls(script)
    plan_input_shapes(script)
    report_functional(script)
    plan_operations(script)
    changed = script.module.visit(Rewriter(script))
    changed = ported_imports(script, changed)
    if script.names.is_assumed:
        line = min((script.line(s) for s in script.module.body), default=1)
        what = "`tf` is nowhere imported: it is taken for TensorFlow"
        script.findings.add(Finding(line, "tf", what, is_left=False))
    has_marks = script.module.code != module.code
    text = _realigned(changed.code) if has_marks else changed.code
    return _ported(script, text.encode(module.encoding), marked)


def _report_backend(script: Script) -> None:
    for node in script.nodes(cst.Assign):
        is_set = "KERAS_BACKEND" in script.code(node.targets[0].target)
        if is_set and text_of(node.value) not in {"", "jax"}:
            script.leave(node, "replicax needs Keras on its 'jax' backend")


def _ported(script: Script, source: bytes, marked: list[Finding]) -> Ported:
    findings = script.findings
    found = {f.reason for f in findings}
    left = {f for f in findings if f.is_left}
    left |= {f for f in marked if f.reason not in found}
    return Ported(
        source=source,
        left=tuple(sorted(left)),
        notes=tuple(sorted(f for f in findings if not f.is_left)),
    )


def _marked_lines(source: bytes, encoding: str) -> list[Finding]:
    """The findings that an earlier run has marked in the text."""
    lines = source.decode(encoding).splitlines()
    found = []
    for i, line in enumerate(lines, 1):
        if line.lstrip().startswith(MARK):
            reason = line.lstrip().removeprefix(MARK)
            below = lines[i].strip() if i < len(lines) else ""
            found.append(Finding(i, below[:70], reason))
    return found


_FORM_FEED = "\f"
_OPEN, _CLOSE = "([{", ")]}"
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def _mark_alignment(text: str) -> str:
    """Replace the indentation of lines that are aligned with a bracket by form feeds.

    One form feed stands for the column behind the bracket. Two stand for the
    indentation of the line with the bracket, where that line is marked itself; further
    blanks follow.
    """
    if _FORM_FEED in text:
        return text
    lines = list(io.StringIO(text, newline=""))
    marks: dict[int, str] = {}
    try:
        for row, column, (opened, behind) in _continued(lines):
            opening = lines[opened]
            start = len(opening) - len(opening.lstrip(" "))
            if lines[row][:column].strip(" "):
                continue  # Tabs are not counted as blanks.
            if column == behind:
                marks[row] = _FORM_FEED
            elif opened in marks and column >= start:
                marks[row] = 2 * _FORM_FEED + " " * (column - start)
    except (tokenize.TokenError, SyntaxError):
        return text  # The parser reports the error.
    for row, mark in marks.items():
        lines[row] = mark + lines[row].lstrip(" ")
    return "".join(lines)


def _realigned(text: str) -> str:
    """Replace the form feeds by blanks up to the bracket's new column."""
    if _FORM_FEED not in text:
        return text
    lines = list(io.StringIO(text, newline=""))
    moved: dict[int, int] = {}
    for row, _, (opened, behind) in _continued(lines):
        line = lines[row].lstrip(_FORM_FEED)
        marks = len(lines[row]) - len(line)
        if marks == 0:
            continue
        opening = lines[opened]
        start = len(opening) - len(opening.lstrip(" "))
        blanks = start if marks > 1 else behind + moved.get(opened, 0)
        lines[row] = " " * blanks + line
        moved[row] = blanks - marks
    return "".join(line.replace(_FORM_FEED, "") for line in lines)


def _continued(lines: list[str]) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """The continuation lines, which begin inside brackets.

    Yields:
        The row of a line, the column of its first token, and the position behind the
        innermost open bracket: its row and column.
    """
    stack: list[tuple[int, int]] = []
    last = -1
    original = iter(list(lines))
    for token in tokenize.generate_tokens(lambda: next(original, "")):
        row, column = token.start[0] - 1, token.start[1]
        if token.type not in _LAYOUT and row != last and stack:
            yield row, column, stack[-1]
        last = max(last, token.end[0] - 1)
        if token.type == tokenize.OP and token.string in _OPEN:
            stack.append((row, column + 1))
        elif token.type == tokenize.OP and token.string in _CLOSE and stack:
            stack.pop()
