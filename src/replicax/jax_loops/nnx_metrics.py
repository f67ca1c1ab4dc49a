"""How the state of NNX metrics is combined over the replicas."""

import contextlib
from collections.abc import Generator
from typing import Any

import jax

from replicax.engine.replica import ReplicaContext

__all__ = ["combined_welfords", "summed_variables"]


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
    """Combine over the replicas what the `with` body adds to `Welford` metrics."""
    from flax import nnx

    welfords = [
        (metric, _state(metric))
        for _, metric in nnx.iter_graph(objects)
        if isinstance(metric, nnx.metrics.Welford)
    ]
    yield
    for metric, before in welfords:
        if metric.count.get_raw_value() is not before[0]:
            _combine(metric, before, context)


def _state(metric: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    return tuple(x.get_raw_value() for x in (metric.count, metric.mean, metric.m2))


def _combine(
    metric: Any, before: tuple[jax.Array, ...], context: ReplicaContext
) -> None:
    """Combine the replicas' updates, all from the state `before` (Chan et al. 1979)."""
    count, mean, m2 = _state(metric)
    shift = mean - before[1]  # Small, so that sums lose no digits.
    increments = (count - before[0], count * shift, m2 + count * shift**2 - before[2])
    counts, sums, squares = context.all_reduce("sum", increments)
    count = before[0] + counts
    metric.count[...] = count
    metric.mean[...] = before[1] + sums / count
    metric.m2[...] = before[2] + squares - sums**2 / count
