"""Makes Keras' means over a replica's rows means over the global batch.

A Keras loss divides by a count: of examples, of unmasked steps, of sample weights. For
the numbers of one device the count must be the global batch's. Local losses become

    share of replica r = sum of r's values / count over all replicas

whose sum over replicas is the global loss. In `fit`, where gradients are averaged and
not summed, shares are multiplied by the number of replicas.

A step may log what it computes from a metric, such as the exponential of a mean loss.
In a replica the metric's state is a part of a sum. The mean of what replicas compute
from their parts is another number than what one device computes from the whole: so in
such steps metrics have the results of all replicas.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Iterable

import keras
import numpy as np
from jax.typing import DTypeLike
from keras import ops

from replicax._private.keras import current_scope, replace_moments
from replicax._private.trainer import tracks_loss
from replicax._private.wraps import Original
from replicax._util.types import PyTree
from replicax.engine.losses import declare_share, is_share
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_call, current_context, current_model
from replicax.engine.whole_batch import require_per_example
from replicax.keras.compiled import replaced_methods

__all__ = [
    "global_results",
    "init_batch_normalization",
    "reduce_weighted_values",
    "update_mean",
]

_logger = logging.getLogger("replicax")


def reduce_weighted_values(
    context: ReplicaContext,
    original: Original,
    values: PyTree,
    sample_weight: PyTree = None,
    mask: PyTree = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: DTypeLike | None = None,
) -> PyTree:
    """Keras' reduction of per-example losses, with a divisor of the global batch.

    (Keras: `keras.src.losses.loss.reduce_weighted_values`, whose scaling for
    `tf.distribute` this corresponds to.)
    """
    loss = original(values, sample_weight, mask, reduction, dtype)
    if reduction in (None, "none") or np.shape(values) == (0,):
        return loss
    if np.shape(values) == ():
        if context.is_per_example:
            require_per_example(current_call(), values)
        return loss
    scale: PyTree = context.loss_scale
    is_weighted = sample_weight is not None or mask is not None
    if reduction == "sum" and context.is_in_metric:
        scale = 1  # Its state is summed; no gradients are averaged.
    elif reduction == "sum":
        if context.takes_equal_shares:
            context.log_own_rows(
                "a loss is scaled by the rows of the whole step",
                "All are taken to have equally many. ",
            )
    elif reduction == "mean_with_sample_weight" and is_weighted:
        ones = ops.ones_like(values, dtype=loss.dtype)
        count = original(ones, sample_weight, mask, "sum", dtype)
        scale *= _share_of(context, count, "the sum of its sample weights")
    elif mask is not None and reduction != "mean_with_sample_weight":
        count = ops.sum(ops.cast(mask, loss.dtype))
        scale *= _share_of(context, count, "the number of its unmasked values")
    else:  # All replicas have the same shapes.
        scale *= 1 / context.num_in_step
    return declare_share(loss * scale)


def _share_of(context: ReplicaContext, count: PyTree, what: str) -> PyTree:
    """A replica's part of a count over all replicas, by which losses are divided."""
    context.log_own_rows(
        f"a loss is divided by {what}",
        "Gradients are the means of the workers' own, weighted by their rows, and "
        "differ from those of the global batch where workers have other shares. ",
    )
    share: PyTree = ops.divide_no_nan(count, context.sum(count))
    return share / context.num_shares


def update_mean(
    context: ReplicaContext,
    original: Original,
    metric: PyTree,
    values: PyTree,
    sample_weight: PyTree = None,
) -> None:
    """Keras' update of a mean, in which a scalar counts once for each batch.

    A scalar, such as a step's loss, stands for the rows of a replica. Replicas that
    share a batch have equally many, and so have equal parts in the batch's one count.
    Where losses are shares, whose sum over replicas is the loss, the mean is of that.
    """
    _note_dropped(metric)
    if is_share(values):
        values = values * (context.num_in_step / context.loss_scale)
    is_scalar = sample_weight is None and ops.ndim(values) == 0
    if is_scalar and context.batch is not None and context.num_counted > 1:
        sample_weight = 1 / context.num_counted
    original(metric, values, sample_weight)


def _note_dropped(metric: PyTree) -> None:
    """Say that Keras drops what a metric is updated with, where it does.

    Steps of `(state, data)` call the model with the values of its variables, without
    those of metrics, and keep the updates of these variables only. Keras' own tracker
    of the loss is dropped on purpose where `metrics` of a model leaves it out.
    """
    if tracks_loss(current_model(), metric):
        return
    scope = current_scope()
    is_call = type(scope) is keras.StatelessScope and scope.state_mapping
    if is_call and id(metric.total) not in scope.state_mapping:
        _log_dropped(current_call(), metric.name)


@functools.cache
def _log_dropped(caller: str, name: str) -> None:
    _logger.warning(
        "%s: metric %r is updated in the call of a layer or model. Keras' steps for "
        "JAX keep no such update, and the metric stays 0. Return what it needs from "
        "the call and update it in compute_metrics, or give the model a "
        "train_step(self, data) with rx.GradientTape, which keeps it.",
        caller,
        name,
    )


def init_batch_normalization(
    original: Original,
    layer: keras.Layer,
    *args: PyTree,
    synchronized: bool = False,
    **kwargs: PyTree,
) -> None:
    """`BatchNormalization.__init__`, which refuses `synchronized=True` on JAX."""
    original(layer, *args, **kwargs)
    layer.synchronized = synchronized
    if synchronized:
        replace_moments(layer, functools.partial(_synchronized_moments, layer))


def _synchronized_moments(
    layer: keras.Layer, own: Original, inputs: PyTree, mask: PyTree
) -> PyTree:
    """Mean and variance of features over the global batch from each replica's own."""
    context = current_context()
    layer.synchronized = False  # In a trace of one thread.
    try:
        mean, variance = own(inputs, mask)
    finally:
        layer.synchronized = True
    if context is None:
        return mean, variance
    context.log_own_rows("BatchNormalization normalises by mean and variance")
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
    """The number of values of each feature that a mask shows."""
    shown = ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs))
    features = layer.axis % inputs.ndim
    axes = [dim for dim in range(inputs.ndim) if dim != features]
    return ops.sum(ops.cast(shown, "float32"), axes)


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

    def noted(metric: PyTree, result: Callable[[], PyTree]) -> Callable[[], PyTree]:
        of_all = functools.partial(_global_result, metric, result, inside)
        return functools.partial(_noted, results, of_all)

    with replaced_methods(metrics, "result", noted):
        yield results


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
