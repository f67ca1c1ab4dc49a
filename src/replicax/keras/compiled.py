"""Compiled losses and metrics, exact on any number of replicas.

Keras' losses and metrics that are sums or means over rows are computed from a replica's
rows. All others are computed from the rows of all replicas; see `engine.whole_batch`.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable

import jax
import keras

from replicax._private.trainer import (
    compiled_metrics,
    function_of,
    replaced_losses,
    wraps_function,
)
from replicax._util.types import PyTree
from replicax.engine.composites import is_composite
from replicax.engine.row_outputs import are_of_rows
from replicax.engine.scope import current_context
from replicax.engine.whole_batch import (
    MOST_BYTES,
    computed_whole,
    keeps_own_rows,
    name_of,
)

__all__ = ["computed_as_compiled", "is_sum_over_rows", "replaced_methods"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOSSES = _names("""
    BinaryCrossentropy BinaryFocalCrossentropy CTC CategoricalCrossentropy
    CategoricalFocalCrossentropy CategoricalGeneralizedCrossEntropy
    CategoricalHinge CosineSimilarity Dice Hinge Huber KLDivergence LogCosh
    MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError
    MeanSquaredLogarithmicError Poisson SparseCategoricalCrossentropy
    SparseCategoricalFocalCrossentropy SquaredHinge Tversky
""")
"""Keras' losses that are means or sums over rows, unless `axis` includes the rows."""

_METRICS = _names("""
    AUC Accuracy BinaryAccuracy BinaryCrossentropy BinaryIoU CategoricalAccuracy
    CategoricalCrossentropy CategoricalHinge ConcordanceCorrelation
    CosineSimilarity F1Score FBetaScore FalseNegatives FalsePositives Hinge IoU
    KLDivergence LogCoshError Mean MeanAbsoluteError MeanAbsolutePercentageError
    MeanIoU MeanSquaredError MeanSquaredLogarithmicError OneHotIoU OneHotMeanIoU
    PearsonCorrelation Poisson Precision PrecisionAtRecall R2Score Recall
    RecallAtPrecision RootMeanSquaredError SensitivityAtSpecificity
    SparseCategoricalAccuracy SparseCategoricalCrossentropy
    SparseTopKCategoricalAccuracy SpecificityAtSensitivity SquaredHinge Sum
    TopKCategoricalAccuracy TrueNegatives TruePositives
""")
"""Keras' metrics whose states are sums over rows, unless `axis` includes the rows."""

_FUNCTIONS = _names("""
    binary_accuracy binary_crossentropy binary_focal_crossentropy
    categorical_accuracy categorical_crossentropy categorical_focal_crossentropy
    categorical_generalized_cross_entropy categorical_hinge
    concordance_correlation cosine_similarity ctc dice hinge huber kl_divergence
    log_cosh mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error pearson_correlation poisson
    sparse_categorical_accuracy sparse_categorical_crossentropy
    sparse_categorical_focal_crossentropy
    sparse_top_k_categorical_accuracy squared_hinge top_k_categorical_accuracy
    tversky
""")
"""Keras' functions that return a value per row, unless `axis` includes the rows."""

_OF_ALL_AXES = (keras.losses.dice, keras.losses.tversky)
"""Functions that combine all rows unless `axis` is set."""


def is_sum_over_rows(item: PyTree, outputs: PyTree) -> bool:
    """Whether a compiled loss or metric is a sum or mean over the rows of `outputs`.

    A subclass of a class in the tables may override methods, so it must declare this.
    """
    fn, options = function_of(item)
    for declared in (keeps_own_rows(item), keeps_own_rows(fn)):
        if declared is not None:
            return declared
    if wraps_function(item):
        is_in_table = _is_of_keras(fn, _FUNCTIONS)
    else:
        names = _LOSSES if isinstance(item, keras.losses.Loss) else _METRICS
        is_in_table = _is_of_keras(type(item), names)
    if not is_in_table:
        return False
    default = None if fn in _OF_ALL_AXES else -1
    axis = options.get("axis", getattr(item, "axis", default))
    leaves = jax.tree.leaves(outputs, is_leaf=is_composite)
    return not any(_includes_rows(axis, x.ndim) for x in leaves)


def _is_of_keras(item: PyTree, names: frozenset[str]) -> bool:
    name = getattr(item, "__name__", "")
    modules = (keras.losses, keras.metrics)
    return name in names and any(getattr(m, name, None) is item for m in modules)


def _includes_rows(axis: int | Iterable[int] | None, rank: int) -> bool:
    """Whether `axis` includes axis 0, the rows, of outputs of this rank."""
    if axis is None or rank < 2:  # The last axis is the rows.
        return True
    return 0 in {x % rank for x in ([axis] if isinstance(axis, int) else axis)}


@contextlib.contextmanager
def computed_as_compiled(model: keras.Model) -> Generator[None]:
    """While open, compiled losses and metrics are computed from the rows they need.

    Metrics that are not arguments of `compile` are computed from a replica's rows.
    Losses inside metrics are not scaled for gradients.
    """
    compiled = compiled_metrics(model)
    of_compile = set(map(id, compiled))

    def update_of(metric: PyTree, update: Callable[..., None]) -> Callable[..., None]:
        is_compiled = id(metric) in of_compile
        return functools.partial(_update_metric, metric, update, is_compiled)

    with (
        replaced_losses(model, lambda loss: functools.partial(_compute_loss, loss)),
        replaced_methods([*model.metrics, *compiled], "update_state", update_of),
    ):
        yield


def _compute_loss(
    loss: PyTree, y: PyTree, outputs: PyTree, sample_weight: PyTree = None
) -> PyTree:
    context = current_context()
    if context is None:
        return loss(y, outputs, sample_weight)
    if context.num_replicas_here > 1 and context.model.batch:
        shapes = [x.shape for x in jax.tree.leaves(outputs, is_leaf=is_composite)]
        if not are_of_rows(shapes, context.model.batch[0].shape[0]):
            context.model.outputs_lack_rows = True
    if is_sum_over_rows(loss, outputs):
        context.model.is_per_example = keeps_own_rows(loss) is True
        try:
            return loss(y, outputs, sample_weight)
        finally:
            context.model.is_per_example = False
    fn, _ = function_of(loss)
    inner = getattr(fn, "__wrapped__", None)
    return computed_whole(
        context,
        f"loss {name_of(loss)}",
        inner if isinstance(inner, keras.losses.Loss) else loss,
        (y, outputs, sample_weight),
        most_bytes=_byte_limit(loss, fn),
    )


def _update_metric(
    metric: PyTree,
    update: Callable[..., None],
    is_compiled: bool,
    *args: PyTree,
    **kwargs: PyTree,
) -> None:
    context = current_context()
    if context is None:
        update(*args, **kwargs)
        return
    outputs = args[1] if len(args) > 1 else kwargs.get("y_pred")
    if not is_compiled or is_sum_over_rows(metric, outputs):
        outer, context.model.is_in_metric = context.model.is_in_metric, True
        try:
            update(*args, **kwargs)
        finally:
            context.model.is_in_metric = outer
        return
    limit = _byte_limit(metric, function_of(metric)[0])
    name = f"metric {name_of(metric)}"
    computed_whole(context, name, update, args, kwargs, most_bytes=limit)


def _byte_limit(*items: object) -> float:
    """The most bytes to gather: no limit if it is declared `whole_batch`."""
    is_declared_whole = any(keeps_own_rows(item) is False for item in items)
    return float("inf") if is_declared_whole else MOST_BYTES


@contextlib.contextmanager
def replaced_methods(
    items: Iterable[PyTree],
    name: str,
    replacement: Callable[[PyTree, Callable[..., PyTree]], Callable[..., PyTree]],
) -> Generator[None]:
    """While open, the method `name` of each item is `replacement(item, method)`."""
    before = [(x, x.__dict__.get(name)) for x in dict.fromkeys(items)]
    for item, _ in before:
        item.__dict__[name] = replacement(item, getattr(item, name))
    try:
        yield
    finally:
        for item, own in before:
            del item.__dict__[name]
            if own is not None:
                item.__dict__[name] = own
