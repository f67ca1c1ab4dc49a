"""Results of metrics inside a step, from the states of all replicas.

A step may log what it computes from a metric, such as the exponential of a mean loss.
In a replica the metric's state is a part of a sum. The mean of what replicas compute
from their parts is another number than what one device computes from the whole.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable

import keras

from replicax._util.types import PyTree
from replicax.engine.scope import current_context

__all__ = ["global_results", "is_of_keras"]


def is_of_keras(model: keras.Model, names: Iterable[str]) -> bool:
    """Whether a model's methods of these names are those of `keras.Model`."""
    return all(
        getattr(getattr(model, name), "__func__", None) is getattr(keras.Model, name)
        for name in names
    )


@contextlib.contextmanager
def global_results(
    metrics: Iterable[keras.metrics.Metric],
) -> Generator[list[PyTree]]:
    """While open, `result` of metrics in a replica function is that of all replicas.

    Args:
        metrics: May contain others, as the metrics that a model compiles do.

    Yields:
        The results so far; of one that is a dictionary its values, too.
    """
    inside: list[keras.metrics.Metric] = []
    results: list[PyTree] = []
    before = [(x, x.__dict__.get("result")) for x in dict.fromkeys(metrics)]
    for metric, _ in before:
        metric.__dict__["result"] = functools.partial(
            _noted,
            results,
            functools.partial(_global_result, metric, metric.result, inside),
        )
    try:
        yield results
    finally:
        for metric, own in before:
            del metric.__dict__["result"]
            if own is not None:
                metric.__dict__["result"] = own


def _noted(results: list[PyTree], result: Callable[[], PyTree]) -> PyTree:
    value = result()
    results.append(value)
    if isinstance(value, dict):
        results += value.values()
    return value


def _global_result(
    metric: keras.metrics.Metric,
    result: Callable[[], PyTree],
    inside: list[keras.metrics.Metric],
) -> PyTree:
    context = current_context()
    if context is None or inside:  # Of a metric that contains this one.
        return result()
    variables = list(metric.variables)
    values = {i: v.value for i, v in enumerate(variables)}
    parts = {i: x for i, x in values.items() if id(variables[i]) in context.summands}
    if parts:
        values |= context.sum(parts)
    inside.append(metric)
    try:
        with keras.StatelessScope([(variables[i], x) for i, x in values.items()]):
            return result()
    finally:
        inside.clear()
