"""How the state of NNX metrics is combined over the replicas."""

import contextlib
import operator
from collections.abc import Generator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from replicax.engine.replica import ReplicaContext

__all__ = ["combined_welfords", "summed_variables"]

Arrays: TypeAlias = tuple[jax.Array, ...]


def summed_variables(objects: tuple[Any, ...]) -> set[int]:
    """Ids of the NNX variables whose increments are summed over the replicas."""
    from flax import nnx

    return {
        id(variable)
        for _, metric in nnx.iter_graph(objects)
        if isinstance(metric, nnx.metrics.Average)
        for variable in vars(metric).values()
        if isinstance(variable, nnx.metrics.MetricState)
    }


@contextlib.contextmanager
def combined_welfords(
    objects: tuple[Any, ...], context: ReplicaContext
) -> Generator[None]:
    """Combine over the replicas the `Welford` metrics that the `with` body changes.

    The first replica begins with the metric's state, the others with an empty one. So
    the body may reset the metric.
    """
    from flax import nnx

    if context.num_replicas_here == 1:
        yield
        return
    is_first = context.replica_id_here == 0
    starts: list[tuple[Any, Arrays, Arrays]] = []
    for _, metric in nnx.iter_graph(objects):
        if isinstance(metric, nnx.metrics.Welford):
            before = _state(metric)
            start = tuple(jnp.where(is_first, x, 0) for x in before)
            _set(metric, start)
            starts.append((metric, before, start))
    yield
    for metric, before, start in starts:
        is_changed = any(map(operator.is_not, _state(metric), start))
        _set(metric, _combined(metric, before[1], context) if is_changed else before)


def _state(metric: Any) -> Arrays:
    return tuple(x.get_raw_value() for x in (metric.count, metric.mean, metric.m2))


def _set(metric: Any, state: Arrays) -> None:
    for x, value in zip((metric.count, metric.mean, metric.m2), state, strict=True):
        x.set_raw_value(value)


def _combined(metric: Any, old_mean: jax.Array, context: ReplicaContext) -> Arrays:
    """The state of all replicas' values (Chan et al. 1979)."""
    count, mean, m2 = _state(metric)
    shift = mean - old_mean  # Small, so that sums lose no digits.
    own = (count, count * shift, m2 + count * shift**2)
    total, sums, squares = context.all_reduce("sum", own)
    divisor = jnp.maximum(total, 1)
    mean = jnp.where(total > 0, old_mean + sums / divisor, 0)
    return total, mean, squares - sums**2 / divisor
