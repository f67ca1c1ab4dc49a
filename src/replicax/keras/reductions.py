"""Turns Keras' means over a replica's rows into means over the global batch.

A Keras loss divides by a count: of examples, of unmasked steps, of sample weights. To
give the numbers of one device, the count must be that of the global batch. The loss of
a replica becomes

    share of replica r = sum of r's values / count over all replicas

and the shares sum to the global loss. `fit` averages gradients over the replicas rather
than summing them, so it multiplies shares by the number of replicas.

A step may log a function of a metric, such as the exponential of a mean loss. In a
replica the metric's state covers the replica's rows only, and the mean of the functions
is not the function of the mean. So in such steps `result` reads the state of all
replicas.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable

import keras
import numpy as np
from jax.typing import DTypeLike
from keras import ops

from replicax._private.keras import replace_moments
from replicax._private.wraps import Original
from replicax._util.types import PyTree
from replicax.engine.losses import declare_share, is_share
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_call, current_context
from replicax.engine.whole_batch import require_per_example
from replicax.keras.compiled import replaced_methods

__all__ = [
    "global_results",
    "init_batch_normalization",
    "reduce_weighted_values",
    "update_mean",
]


def reduce_weighted_values(
    context: ReplicaContext,
    original: Original,
    values: PyTree,
    sample_weight: PyTree = None,
    mask: PyTree = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: DTypeLike | None = None,
) -> PyTree:
    """Keras' reduction of per-example losses, divided by the global batch's count.

    Corresponds to the `tf.distribute` scaling in Keras'
    `keras.src.losses.loss.reduce_weighted_values`.
    """
    loss = original(values, sample_weight, mask, reduction, dtype)
    if reduction in (None, "none") or np.shape(values) == (0,):
        return loss
    if np.shape(values) == ():
        if context.model.is_per_example:
            require_per_example(current_call(), values)
        return loss
    scale: PyTree = context.loss_scale
    is_weighted = sample_weight is not None or mask is not None
    if reduction == "sum":
        if context.model.is_in_metric:
            scale = 1  # The metric's state is summed over the replicas.
    elif reduction == "mean_with_sample_weight" and is_weighted:
        ones = ops.ones_like(values, dtype=loss.dtype)
        count = original(ones, sample_weight, mask, "sum", dtype)
        scale *= _share_of(context, count)
    elif mask is not None and reduction != "mean_with_sample_weight":
        count = ops.sum(ops.cast(mask, loss.dtype))
        scale *= _share_of(context, count)
    else:  # All replicas have the same number of rows.
        scale *= 1 / context.num_counted
    return declare_share(loss * scale)


def _share_of(context: ReplicaContext, count: PyTree) -> PyTree:
    return ops.divide_no_nan(count, context.sum(count))


def update_mean(
    context: ReplicaContext,
    original: Original,
    metric: keras.metrics.Mean,
    values: PyTree,
    sample_weight: PyTree = None,
) -> None:
    """Keras' update of a mean, in which a scalar counts once for each global batch.

    Each replica updates with its own scalar, such as the loss of its rows. The replicas
    that share a batch have equally many rows, so with k of them a scalar has weight
    1 / k. A loss that is already divided by the global count (a share) is multiplied
    back first, so that the mean is the global loss.
    """
    if is_share(values):
        values = values * (context.num_counted / context.loss_scale)
    is_scalar = sample_weight is None and ops.ndim(values) == 0
    if is_scalar and context.model.batch is not None and context.num_counted > 1:
        sample_weight = 1 / context.num_counted
    original(metric, values, sample_weight)


def init_batch_normalization(
    original: Original,
    layer: keras.Layer,
    *args: PyTree,
    synchronized: bool = False,
    **kwargs: PyTree,
) -> None:
    """`BatchNormalization.__init__`; Keras' own refuses `synchronized=True` on JAX."""
    original(layer, *args, **kwargs)
    layer.synchronized = synchronized  # Users may change it later.
    replace_moments(layer, functools.partial(_moments, layer))


def _moments(layer: keras.Layer, own: Original, inputs: PyTree, mask: PyTree) -> PyTree:
    if not layer.synchronized:
        return own(inputs, mask)
    context = current_context()
    layer.synchronized = False  # Keras' method `own` refuses True.
    try:
        mean, variance = own(inputs, mask)
    finally:
        layer.synchronized = True
    if context is None:
        return mean, variance
    count: PyTree = None if mask is None else _num_unmasked(layer, inputs, mask)
    if count is not None:
        count = ops.reshape(ops.cast(count, mean.dtype), ops.shape(mean))

    def average(values: PyTree) -> PyTree:
        if count is None:
            return context.mean(values)
        return ops.divide_no_nan(context.sum(values * count), context.sum(count))

    global_mean = average(mean)
    # Variance inside the replicas plus variance of their means.
    return global_mean, average(variance + ops.square(mean - global_mean))


def _num_unmasked(layer: keras.Layer, inputs: PyTree, mask: PyTree) -> PyTree:
    unmasked = ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs))
    features = layer.axis % inputs.ndim
    axes = [dim for dim in range(inputs.ndim) if dim != features]
    return ops.sum(ops.cast(unmasked, "float32"), axes)


@contextlib.contextmanager
def global_results(
    metrics: Iterable[keras.metrics.Metric],
) -> Generator[list[PyTree]]:
    """While open, `result` of a metric in a replica function covers all replicas.

    A metric may contain others, as the compiled metrics do. Yields a list that grows
    with each result; a dictionary is followed by its values.
    """
    outer_metrics: list[keras.metrics.Metric] = []
    results: list[PyTree] = []

    def of_all_replicas(
        metric: keras.metrics.Metric, result: Callable[[], PyTree]
    ) -> Callable[[], PyTree]:
        def recorded() -> PyTree:
            value = _global_result(metric, result, outer_metrics)
            results.append(value)
            if isinstance(value, dict):
                results.extend(value.values())
            return value

        return recorded

    with replaced_methods(metrics, "result", of_all_replicas):
        yield results


def _global_result(
    metric: keras.metrics.Metric,
    result: Callable[[], PyTree],
    outer_metrics: list[keras.metrics.Metric],
) -> PyTree:
    context = current_context()
    # A metric around this one has summed its state.
    if context is None or outer_metrics:
        return result()
    variables = list(metric.variables)
    values = {i: v.value for i, v in enumerate(variables)}
    addends = {i: x for i, x in values.items() if id(variables[i]) in context.summands}
    if addends:
        values |= context.sum(addends)
    outer_metrics.append(metric)
    try:
        with keras.StatelessScope([(variables[i], x) for i, x in values.items()]):
            return result()
    finally:
        outer_metrics.clear()
