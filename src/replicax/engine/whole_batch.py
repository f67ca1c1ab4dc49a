"""Losses and metrics of the whole batch, which each replica computes from all rows.

Each replica gathers the rows of all replicas. Gradients reach only its own rows, so the
backward pass needs no communication; the sum of the replicas' gradients is the gradient
on one device.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras
from jax import lax
from jax.typing import ArrayLike

from replicax._private.keras import attach_masks, current_scope, masks_of
from replicax._util.types import PyTree
from replicax.engine.composites import require_dense
from replicax.engine.losses import declare_share
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_call, current_context
from replicax.engine.variables import ChildScope

__all__ = [
    "MOST_BYTES",
    "computed_whole",
    "keeps_own_rows",
    "name_of",
    "per_example",
    "require_per_example",
    "whole_batch",
]

MOST_BYTES = 2**28
"""Losses and metrics gather at most 256 MB, unless declared `whole_batch`."""

_ROWS = "_replicax_rows"

F = TypeVar("F", bound=Callable[..., PyTree])


def whole_batch(fn: F) -> F:
    """Compute a loss or metric on each replica from the rows of all replicas.

    Contrastive, ranking and overlap losses need this in a custom step. `compile` does
    the same for losses and metrics that are not known to be sums or means over rows; if
    declared, they may also gather arrays of more than 256 MB.

    Args:
        fn: A function of pytrees of arrays that gets all rows of the global batch,
            `[B, ...]`, without the copies that fill a batch which does not divide. It
            returns a scalar, such as a loss, or None, such as a metric's
            `update_state`. Or a `keras.losses.Loss`; or, for `compile` only, a
            `keras.metrics.Metric`.

    Returns:
        A function of a replica's rows, `[b, ...]`; a `Metric` is returned unchanged. In
        `fit` and `evaluate` the function returns the loss of the whole batch. In
        `strategy.run`, where gradients are summed, it returns this replica's share:
        `1 / R` of the loss, as Keras' losses do there. In both, the combined gradients
        are those of one device. Outside a step it calls `fn`.

    Raises:
        TypeError: If `fn` cannot be called.
        ValueError: When the function is called in a step, if an argument has no rows,
            or `fn` returns an array that is not a scalar.

    Example:
        >>> import jax.numpy as jnp, numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
        >>> def largest(x):
        ...     return jnp.max(x)
        >>> def step(x):
        ...     return rx.losses.whole_batch(largest)(x)
        >>> x = strategy.experimental_distribute_values_from_function(
        ...     lambda context: np.float32([context.replica_id_in_sync_group])
        ... )
        >>> shares = strategy.run(step, args=(x,))
        >>> strategy.reduce("sum", shares).item()
        1.0
    """
    if isinstance(fn, keras.metrics.Metric):
        return _marked(fn, "whole")
    _require_callable(fn, "whole_batch")

    @functools.wraps(fn, updated=())
    def of_all_rows(*args: PyTree, **kwargs: PyTree) -> PyTree:
        context = current_context()
        if context is None:
            return fn(*args, **kwargs)
        return computed_whole(context, name_of(fn), fn, args, kwargs)

    if isinstance(fn, keras.losses.Loss):
        of_all_rows.__name__ = fn.name
    return _marked(of_all_rows, "whole")


def per_example(fn: F) -> F:
    """Declare that a loss or metric computes each example's value from that example.

    Each replica then computes it from its own rows, and nothing is gathered. Without
    this declaration, `compile` gives a custom loss or metric the rows of all replicas.

    Args:
        fn: A loss or metric function of `(y_true, y_pred)`, `[b, ...]`, that returns
            one value for each example, `[b]` or `[b, ...]`; a `keras.losses.Loss` with
            such a `call`; or a `keras.metrics.Metric` whose state is a sum over
            examples.

    Returns:
        `fn` itself if it is a `Loss` or `Metric`, otherwise a function that calls it.

    Raises:
        TypeError: If `fn` cannot be called.
        ValueError: When the step is traced, if `fn` returns a scalar.

    Example:
        >>> import keras, numpy as np, replicax as rx
        >>> def absolute(y_true, y_pred):
        ...     return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)
        >>> absolute = rx.losses.per_example(absolute)
        >>> absolute(np.ones((2, 3)), np.zeros((2, 3))).tolist()
        [1.0, 1.0]
    """
    if not isinstance(fn, keras.metrics.Metric):
        _require_callable(fn, "per_example")
    if isinstance(fn, keras.losses.Loss | keras.metrics.Metric):
        return _marked(fn, "own")

    @functools.wraps(fn, updated=())
    def of_own_rows(*args: PyTree, **kwargs: PyTree) -> PyTree:
        values = fn(*args, **kwargs)
        require_per_example(fn, values)
        return values

    return _marked(of_own_rows, "own")


def require_per_example(fn: object, values: PyTree) -> None:
    """Raise if a loss or metric declared `per_example` returned a scalar."""
    if _rank(values) == 0:
        raise ValueError(
            f"{current_call()}: {name_of(fn)} is declared rx.losses.per_example, but "
            "returned a scalar; expected one value per example, [b]. Remove the mean "
            "over the first dimension; or, if the examples are not independent, use "
            "rx.losses.whole_batch."
        )


def keeps_own_rows(fn: object) -> bool | None:
    """True if `fn` is declared `per_example`, False if `whole_batch`, else None."""
    rows = getattr(fn, _ROWS, None)
    return None if rows is None else rows == "own"


def name_of(fn: object) -> str:
    """The name of a loss or metric, for messages."""
    owner = getattr(fn, "__self__", fn)  # Of a metric's `update_state`.
    return repr(getattr(owner, "name", getattr(fn, "__name__", type(fn).__name__)))


def computed_whole(
    context: ReplicaContext,
    name: str,
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree] | None = None,
    *,
    most_bytes: float = float("inf"),
) -> PyTree:
    """Call `fn` with the rows of all replicas that hold examples; see `whole_batch`.

    `fn` assigns equal values to its variables on all replicas.
    """
    arguments = (args, kwargs or {})
    is_alone = context.num_replicas_here == 1
    if not is_alone:
        _require_rows(context, name, arguments, most_bytes)
        arguments = _rows_of_all(context, arguments)
    with context.alone(), ChildScope(current_scope()) as scope:
        result = fn(*arguments[0], **arguments[1])
    for variable, value in scope.updates():
        variable.assign(value)
    if scope.written:
        context.note_mirrored(list(scope.written.values()))
        context.model.metrics_of_whole.append(name)
    if result is None:
        return None
    if _rank(result) > 0 and not is_alone:
        raise ValueError(
            f"{current_call()}: {name} is computed from the rows of all replicas and "
            f"returned an array of shape {tuple(result.shape)}; expected a scalar. "
            "Reduce it over the rows, such as with ops.mean; or, if each value depends "
            "on one example only, use rx.losses.per_example."
        )
    scale = context.loss_scale / context.num_counted  # See `_gathered`.
    return declare_share(result if scale == 1 else result * scale)


def _rows_of_all(context: ReplicaContext, tree: PyTree) -> PyTree:
    """Join the rows `[b, ...]` of all replicas that hold examples to `[B, ...]`."""
    masks = [
        None if mask is None else context.all_gather(mask, 0, drop_copies=True)
        for mask in masks_of(tree)
    ]
    require_dense(tree, current_call())

    def gather(x: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return context.all_gather(x, 0, drop_copies=True)
        return _gathered(x, context)[: x.shape[0] * context.num_counted]

    tree = jax.tree.map(gather, tree)
    attach_masks(tree, masks)
    return tree


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _gathered(own: jax.Array, context: ReplicaContext) -> jax.Array:
    """The rows of all replicas, with copies; gradients reach `own`, multiplied by R.

    Combined gradients are divided by R: in `fit` by the mean over replicas, elsewhere
    by the loss. All R replicas have the gradient of a weight that `fn` reads. Only one
    replica has the gradient of a row, so it is multiplied by R here.
    """
    return context.all_gather(own, 0)


@_gathered.defjvp
def _(
    context: ReplicaContext, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (own,), (tangent,) = primals, tangents
    rows = _gathered(own, context)
    # Cast R, so that the tangent keeps its dtype.
    tangent = tangent * jnp.asarray(context.num_counted, tangent.dtype)
    start = context.replica_id_here * own.shape[0]
    return rows, lax.dynamic_update_slice_in_dim(
        jnp.zeros_like(rows), tangent, start, 0
    )


def _require_rows(
    context: ReplicaContext, name: str, tree: PyTree, most_bytes: float
) -> None:
    """Raise for arguments without the batch's rows, or of more than `most_bytes`."""
    leaves = jax.tree.leaves(tree)
    shapes = [tuple(x.shape) for x in leaves]
    batch = context.model.batch
    leading = {s[:1] for s in [*shapes, *(x.shape for x in (batch or [])[:1])]}
    if () in leading or len(leading) > 1:
        raise ValueError(
            f"{current_call()}: {name} is computed from the rows of all replicas, but "
            f"got arrays of shapes {shapes}"
            + (f" for {len(batch[0])} rows on each replica" if batch else "")
            + ". Pass only arrays with one row per example, and bind other arguments "
            "with functools.partial; or, if each row's value depends on that row only, "
            "declare rx.losses.per_example(fn)."
        )
    num_bytes = context.num_counted * sum(x.size * x.dtype.itemsize for x in leaves)
    if num_bytes > most_bytes:
        raise ValueError(
            f"{current_call()}: {name} is not known to be a mean or sum over examples, "
            "so each replica gathers the targets and outputs of all replicas: "
            f"{num_bytes / 2**20:,.0f} MB, more than {most_bytes / 2**20:,.0f}. If "
            "each example's value depends on that example only, declare "
            "rx.losses.per_example(fn). To gather the arrays in spite of their size, "
            "declare rx.losses.whole_batch(fn)."
        )


def _rank(x: object) -> int:
    return len(getattr(x, "shape", ()))


def _marked(fn: PyTree, rows: str) -> PyTree:
    setattr(fn, _ROWS, rows)
    return fn


def _require_callable(fn: object, caller: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"rx.losses.{caller}: fn must be a function, a keras.losses.Loss or a "
            f"keras.metrics.Metric; got {fn!r}."
        )
