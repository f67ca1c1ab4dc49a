"""Ports names of losses, constraints and regularizers that Keras 3 does not know."""

import libcst as cst

from replicax.migrate.arguments import argument
from replicax.migrate.names import method_of
from replicax.migrate.origins import elements
from replicax.migrate.script import Script

__all__ = ["plan_identifiers"]

_LOSSES = {
    "huber_loss": "huber",
    "kullback_leibler_divergence": "kl_divergence",
    "logcosh": "log_cosh",
}
_METRICS = ("cosine_proximity", "kullback_leibler_divergence", "log_cosh", "logcosh")
"""Metrics of tf.keras; a port by another name would be logged by that name."""
_OF_LAYERS = {
    "_constraint": {
        "maxnorm": "max_norm",
        "nonneg": "non_neg",
        "unitnorm": "unit_norm",
    },
    "_regularizer": {"l1_l2": "l1l2"},
    "_initializer": {"constant": "zeros"},
}
"""By the ending of a keyword: names of tf.keras, and what Keras 3 calls them."""


def plan_identifiers(script: Script) -> None:
    """Plan the names of Keras 3 for literals that it does not know, or report them."""
    for call in script.calls:
        if method_of(call) == "compile":
            loss = argument(call.args, 1, "loss")
            for part in _parts(script, loss.value) if loss is not None else ():
                _plan(script, part, _LOSSES)
            metrics = argument(call.args, 2, "metrics")
            for part in _parts(script, metrics.value) if metrics is not None else ():
                if _text(part) in _METRICS:
                    script.leave(
                        part,
                        f"Keras 3 has no metric {_text(part)!r}: give a class of "
                        "keras.metrics, such as KLDivergence or LogCoshError",
                    )
        for arg in call.args:
            name = arg.keyword.value if arg.keyword else ""
            for ending, names in _OF_LAYERS.items():
                if name.endswith(ending):
                    _plan(script, arg.value, names)


def _parts(script: Script, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """The literals of a loss or metric, in nested lists and dicts too."""
    node = script.flow.resolved(node)
    inner = elements(script, node)
    return [part for each in inner for part in _parts(script, each)] or [node]


def _text(node: cst.BaseExpression) -> str:
    return str(node.evaluated_value) if isinstance(node, cst.SimpleString) else ""


def _plan(script: Script, node: cst.BaseExpression, names: dict[str, str]) -> None:
    new = names.get(_text(node))
    if new is not None and isinstance(node, cst.SimpleString):
        made = f"{node.prefix}{node.quote}{new}{node.quote}"
        script.replacements[node] = lambda _: cst.SimpleString(made)
