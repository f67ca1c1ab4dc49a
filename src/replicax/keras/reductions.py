"""Makes Keras' means over a replica's rows means over the global batch.

A Keras loss divides by a count: of examples, of unmasked steps, of sample weights. For
the numbers of one device the count must be the global batch's. Local losses become

    share of replica r = sum of r's values / count over all replicas

whose sum over replicas is the global loss. In `fit`, where gradients are averaged and
not summed, shares are multiplied by the number of replicas.
"""

import functools
import logging

from keras import ops

from replicax._private.wraps import Original
from replicax._util.types import PyTree
from replicax.engine.replica import ReplicaContext

__all__ = ["apply_mask", "reduce_values", "synchronized_moments"]

_logger = logging.getLogger("replicax")


def reduce_values(
    context: ReplicaContext,
    original: Original,
    values: PyTree,
    sample_weight: PyTree = None,
    reduction: str | None = "sum_over_batch_size",
) -> PyTree:
    """Keras' reduction of weighted per-example losses, with a global divisor.

    (Keras: `keras.src.losses.loss.reduce_values`, whose scaling for `tf.distribute`
    this corresponds to.)
    """
    if reduction in (None, "none") or tuple(values.shape) in ((), (0,)):
        return original(values, sample_weight, reduction)
    total: PyTree = ops.sum(values)
    total = total * context.loss_scale
    if reduction == "sum":
        return total
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        _note_part_of_count(context, "the sum of its sample weights")
        count = ops.cast(ops.sum(sample_weight), total.dtype)
        return ops.divide_no_nan(total, context.sum(count))
    # All replicas have the same shapes.
    return total / (values.size * context.num_counted)


def apply_mask(
    context: ReplicaContext,
    original: Original,
    sample_weight: PyTree,
    mask: PyTree,
    dtype: object,
    reduction: str | None,
) -> PyTree:
    """Keras' weights for masked values, with the global share of unmasked ones."""
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return original(sample_weight, mask, dtype, reduction)
    _note_part_of_count(context, "the number of its unmasked values")
    # Keras gives unmasked values the weight total / valid, counted on this replica.
    valid = ops.sum(ops.cast(mask, dtype))
    total: PyTree = ops.cast(mask.size, dtype)
    weights = original(sample_weight, mask, dtype, reduction)
    local = ops.divide_no_nan(total, valid)
    globally = ops.divide_no_nan(total * context.num_counted, context.sum(valid))
    return weights * ops.divide_no_nan(globally, local)


def _note_part_of_count(context: ReplicaContext, what: str) -> None:
    """Say that a loss is not the mean over the global batch, where it is not."""
    if context.num_replicas_in_sync > context.num_replicas_here:
        _log_part_of_count(type(context.strategy).__name__, what)


@functools.cache
def _log_part_of_count(strategy: str, what: str) -> None:
    _logger.warning(
        "%s: a loss is divided by %s, which each worker knows of its own rows only. "
        "Gradients are the means of the workers' own, weighted by their rows, and "
        "differ from those of the global batch where workers have other shares. Use "
        "rx.MultiWorkerMirroredStrategy for the same as on one device.",
        strategy,
        what,
    )


def synchronized_moments(
    context: ReplicaContext, mean: PyTree, variance: PyTree
) -> tuple[PyTree, PyTree]:
    """Mean and variance over the global batch from each replica's own."""
    global_mean = context.mean(mean)
    # Variance inside the replicas plus variance of their means.
    return global_mean, context.mean(variance + ops.square(mean - global_mean))
