"""How state that layers compute from a replica's own rows is combined.

Keras declares no aggregation for moving statistics, and other packages declare none at
all. A strategy's rule by the variable's path comes first; the tables here are the
defaults for layers that are known. Packages are never imported: a class is known by the
package that defines it and by its name.
"""

import functools
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import keras
from jax.typing import DTypeLike

from replicax._private.keras import named_by, set_combination
from replicax._util.types import PyTree
from replicax.engine.aggregation import Rule, aggregation_of
from replicax.engine.protocols import StrategyLike
from replicax.engine.scope import current_context

__all__ = ["set_aggregation"]

_RULES: Mapping[str, Mapping[str, Rule]] = {
    # The bits for the largest value so far, a maximum over rows.
    "hgq.FixedPointQuantizerBase": {"i": "max", "k": "max"},
    # The statistics of dense layers that normalise batches.
    "hgq.QLayerBase": {"moving_mean": "mean", "moving_variance": "mean"},
}
"""Rules by class, `"package.Class"`, and by the names of its variables."""

_OF_ROWS: Mapping[str, str] = {
    # Updates mean, sum of squares and count together, from rows `[b, ..., d]`.
    "bayesflow.Standardize": "_update_moments",
}
"""Methods that update state from rows; in replicas they get the global batch's."""


def set_aggregation(
    strategy: StrategyLike,
    variable: keras.Variable,
    path: str,
    dtype: DTypeLike | None,
    kwargs: PyTree,
) -> None:
    """Set the aggregation of a variable that is about to be created with `kwargs`."""
    owner = named_by()
    if kwargs.get("trainable", True) or isinstance(
        owner, keras.Optimizer | keras.random.SeedGenerator
    ):
        return
    names = [f"{c.__module__.split('.')[0]}.{c.__name__}" for c in type(owner).__mro__]
    methods = {_OF_ROWS[name] for name in names if name in _OF_ROWS}
    for method in methods:
        _pass_all_rows(owner, method)
    rule = strategy.group.aggregation.of(path)
    if rule is None:
        rules = [_RULES.get(name, {}).get(kwargs.get("name", "")) for name in names]
        rule = next((aggregation_of(x) for x in rules if x is not None), None)
    if methods or (rule is not None and rule.combine is not None):
        _refuse_servers(strategy, path, owner)
    if rule is not None:
        kwargs["aggregation"] = rule.of_keras
        set_combination(variable, rule.combine)
    elif _is_moving_statistic(owner, dtype, kwargs):
        kwargs["aggregation"] = "mean"


def _refuse_servers(strategy: StrategyLike, path: str, owner: object) -> None:
    """Raise if parameter servers would add the workers' changes of a variable."""
    num_workers = strategy.input_shard.num_workers
    if num_workers > 1 and not strategy.home.keeps_slots:
        kind = type(owner)
        raise NotImplementedError(
            f"{kind.__module__.split('.')[0]}.{kind.__name__}: variable {path!r} is "
            "computed from the rows of all replicas. The servers of "
            f"{type(strategy).__name__} add the changes of {num_workers} workers, each "
            "from rows of its own, which gives another value. Use "
            "rx.MultiWorkerMirroredStrategy, or one worker."
        )


def _is_moving_statistic(
    owner: object, dtype: DTypeLike | None, kwargs: PyTree
) -> bool:
    """Whether a layer creates moving statistics, for which Keras sets no aggregation.

    Flax layers have them too (`batch_stats`). Their counters and keys have no mean.
    """
    if kwargs.get("aggregation") not in (None, "none"):
        return False
    is_float = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    return is_float and isinstance(
        owner, keras.layers.BatchNormalization | keras.layers.JaxLayer
    )


def _pass_all_rows(layer: PyTree, name: str) -> None:
    """Make a layer's method `name`, if it exists, get the rows of all replicas."""
    if name not in vars(layer) and hasattr(layer, name):
        # Not a closure: a deep copy of the layer must call its own method.
        setattr(layer, name, functools.partial(_with_all_rows, getattr(layer, name)))


def _with_all_rows(
    method: Callable[..., PyTree], rows: PyTree, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    context = current_context()
    if context is not None:
        gathered = context.all_gather(rows, 0, drop_copies=True)
        rows = context.stop_uncounted_gradients(gathered)
    return method(rows, *args, **kwargs)
