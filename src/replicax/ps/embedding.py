"""`Embedding`: a table of vectors that may lie on parameter servers, row by row.

On servers the layer has no variable of the table's size. A callback on the host looks
up the step's rows, and another callback in the backward pass collects the rows'
gradients. A variable of one element, the anchor, ties both callbacks to the step: the
program must compute the rows' gradients to compute the anchor's gradient.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from jax.experimental import io_callback

from replicax._util.types import JSONObject, PyTree, Shape
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_context, current_strategy
from replicax.ps.table import TableSpec, check_ids, sum_duplicates

if TYPE_CHECKING:
    from replicax.ps.rows import RemoteTables

__all__ = ["Embedding"]

Regularizer = str | JSONObject | keras.regularizers.Regularizer
Constraint = str | JSONObject | keras.constraints.Constraint

# float32 represents all whole numbers up to this one.
_EXACT_FLOATS = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RemoteTable:
    source: "RemoteTables"
    spec: TableSpec

    def pull(self, ids: np.ndarray) -> np.ndarray:
        """Rows for ids of any shape; each distinct row is fetched once."""
        spec = self.spec
        flat = check_ids(ids.ravel(), spec.num_rows, f"Embedding {spec.name!r}")
        distinct, place = np.unique(flat, return_inverse=True)
        rows = self.source.pull(spec.name, distinct)
        return rows[place].reshape(*ids.shape, spec.dim)

    def collect(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Collect gradients for ids of any shape; sums them over equal ids."""
        flat = ids.ravel().astype(np.int64)
        rows = sum_duplicates(flat, gradients.reshape(len(flat), self.spec.dim))
        self.source.collect(self.spec.name, *rows)


@keras.saving.register_keras_serializable(package="replicax")
class Embedding(keras.layers.Embedding):
    """An embedding layer as Keras', also for tables that no worker could hold.

    In the scope of a `ParameterServerStrategy` the table lies on the servers, row by
    row. A step pulls the rows of its batch only and pushes only their gradients, so no
    worker holds the table. Rows are updated lazily: a row that is not in the batch
    keeps its value and its optimizer state. The layer's only variable is then the
    anchor of shape `(1,)`, which stays zero. Saved models do not contain the rows of
    such a table; the servers' snapshots do. Layers of the same name share a table, with
    the initializer and seed of the first layer.

    Elsewhere the layer behaves exactly as `keras.layers.Embedding`.

    Args:
        input_dim: Number of rows.
        output_dim: Elements of a row.
        embeddings_initializer: As in Keras. On servers: `RandomUniform`,
            `RandomNormal`, `TruncatedNormal`, `Zeros`, `Ones` or `Constant`.
        embeddings_regularizer: As in Keras; not on servers.
        embeddings_constraint: As in Keras; not on servers.
        mask_zero: Whether id 0 stands for padding, as in Keras.
        weights: First values `[input_dim, output_dim]`; not on servers.
        seed: Seed of a random initializer, an int. None: the initializer's own.
        **kwargs: Other arguments of `keras.layers.Embedding`.

    Raises:
        ValueError: For sizes below 1. On servers, when the layer is built, for options
            that need the whole table.

    Example:
        >>> import numpy as np, replicax as rx
        >>> layer = rx.layers.Embedding(1000, 8, seed=1)
        >>> layer(np.array([[1, 2, 1]])).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: object = "uniform",
        embeddings_regularizer: Regularizer | None = None,
        embeddings_constraint: Constraint | None = None,
        mask_zero: bool = False,
        weights: Sequence[np.ndarray] | None = None,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        initializer: Any = keras.initializers.get(embeddings_initializer)
        if seed is not None and hasattr(initializer, "seed"):
            initializer = type(initializer).from_config(
                {**initializer.get_config(), "seed": seed}
            )
        self.seed = seed
        self._table: _RemoteTable | None = None
        self._has_weights = weights is not None
        super().__init__(
            input_dim,
            output_dim,
            embeddings_initializer=initializer,
            embeddings_regularizer=embeddings_regularizer,
            embeddings_constraint=embeddings_constraint,
            mask_zero=mask_zero,
            weights=weights,
            **kwargs,
        )

    def build(self, input_shape: Shape | None = None) -> None:
        """Create the table, here or on the servers of the current strategy."""
        source = _tables()
        if self.built or source is None:
            super().build(input_shape)
            return
        self._refuse_what_needs_the_table()
        initializer: Any = self.embeddings_initializer
        config: Any = keras.initializers.serialize(initializer)
        spec = TableSpec(
            name=self.name,
            num_rows=self.input_dim,
            dim=self.output_dim,
            initializer=config,
            seed=_seed_of(initializer),
        )
        self.anchor: keras.Variable = self.add_weight(
            shape=(1,), initializer="zeros", name="anchor", trainable=True
        )
        self.anchor.table_name = self.name  # The table that the optimizer updates.
        self._table = _RemoteTable(source=source, spec=spec)
        source.create(spec)
        self.built = True

    @property
    def table_name(self) -> str | None:
        """The table's name on the servers; None if the table is a variable here."""
        return None if self._table is None else self._table.spec.name

    @property
    def embeddings(self) -> PyTree:
        """The whole table `[input_dim, output_dim]`, if it is not on servers."""
        if self._table is not None:
            raise AttributeError(
                f"Embedding.embeddings: the rows of {self.table_name!r} are on the "
                "parameter servers, and no worker holds them all. Call the layer with "
                "the ids whose rows you need."
            )
        return super().embeddings

    def call(self, inputs: PyTree) -> PyTree:
        """Look up ids of any shape; returns their rows along a new last dimension."""
        if self._table is None:
            return super().call(inputs)
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if not dtype.startswith(("int", "uint")):
            if self.input_dim > _EXACT_FLOATS:
                raise ValueError(
                    f"Embedding {self.name!r}: got ids of dtype {dtype}, which cannot "
                    f"represent {self.input_dim} different ids. Use int32 ids, and "
                    "keras.Input(shape, dtype='int32')."
                )
            inputs = keras.ops.cast(inputs, "int32")
        anchor, ids = self.anchor.value, jnp.asarray(inputs)
        if isinstance(anchor, Tracer) or isinstance(ids, Tracer):
            rows = _lookup(self._table, current_context())(anchor, ids)
        else:
            # Without a callback: JAX would raise its error again at the process' end.
            rows = self._table.pull(np.asarray(ids))
        return keras.ops.cast(rows, self.compute_dtype)

    def save_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """As in Keras; saves nothing of a table on servers."""
        if self._table is None:
            super().save_own_variables(store)

    def load_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """As in Keras; loads nothing into a table on servers.

        Raises:
            ValueError: If the saved layer had its table on servers and this layer has
                not, or the other way round.
        """
        has_rows = bool(len(store.keys()))
        if self._table is None:
            if self.built and not has_rows:
                raise ValueError(
                    f"Embedding {self.name!r}: the saved layer had its rows on "
                    "parameter servers, so the saved weights have none. Load it in the "
                    "scope of a ParameterServerStrategy."
                )
            super().load_own_variables(store)
        elif has_rows:
            raise ValueError(
                f"Embedding {self.name!r}: the rows are on parameter servers and "
                "cannot be set from saved weights. Servers restore their snapshots."
            )

    def get_config(self) -> JSONObject:
        """As in Keras, with the seed."""
        return {**super().get_config(), "seed": self.seed}

    def _refuse_what_needs_the_table(self) -> None:
        refused = {
            "embeddings_regularizer": self.embeddings_regularizer,
            "embeddings_constraint": self.embeddings_constraint,
            "weights": self._has_weights or None,
            "lora_rank": self.lora_rank,
            "quantization": self.quantization_mode,
        }
        for option, value in refused.items():
            if value is not None:
                raise ValueError(
                    f"Embedding {self.name!r}: {option} needs the whole table, but its "
                    "rows lie on parameter servers. Leave it out."
                )
        if self.variable_dtype != "float32":
            raise ValueError(
                f"Embedding {self.name!r}: got dtype={self.variable_dtype!r}, but rows "
                "are float32 on the servers. Use dtype='float32' or a mixed policy."
            )
        ids = jax.dtypes.canonicalize_dtype(np.int64)
        if self.input_dim > np.iinfo(np.int32).max and ids != np.int64:
            raise ValueError(
                f"Embedding {self.name!r}: input_dim={self.input_dim} needs ids of "
                "more than 32 bits. Set jax_enable_x64."
            )


def _tables() -> "RemoteTables | None":
    """The current strategy's client of tables; None if it has no servers."""
    context = current_context()
    strategy = current_strategy() if context is None else context.strategy
    home = None if strategy is None else strategy.home
    return getattr(home, "rows", None)  # Only `ServerHome` has `rows`.


def _seed_of(initializer: object) -> int:
    """The seed of a random initializer; 0 for others."""
    seed = getattr(initializer, "seed", 0)
    if not isinstance(seed, int):
        raise ValueError(
            f"Embedding: embeddings_initializer has seed={seed!r}; for rows on "
            "parameter servers it must be an int. Pass Embedding(..., seed=1)."
        )
    return seed


def _lookup(
    table: _RemoteTable, context: ReplicaContext | None
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a differentiable function `(anchor, ids) -> rows`."""

    def failed(error: Exception) -> None:
        if context is None:  # No other replica waits in a collective.
            raise error
        table.source.fail(error)

    def pull(anchor: np.ndarray, ids: np.ndarray) -> np.ndarray:
        try:
            return table.pull(np.asarray(ids))
        except Exception as error:  # noqa: BLE001 - the strategy raises it
            failed(error)
            return np.full((*ids.shape, table.spec.dim), np.nan, np.float32)

    def collect(
        ids: np.ndarray, gradients: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        try:
            if counts:
                table.collect(np.asarray(ids), np.asarray(gradients))
        except Exception as error:  # noqa: BLE001 - the strategy raises it
            failed(error)
        return np.zeros(1, np.float32)

    def rows_of(anchor: jax.Array, ids: jax.Array) -> jax.Array:
        # The anchor is an input so that JAX differentiates the rows by it.
        shape = jax.ShapeDtypeStruct((*ids.shape, table.spec.dim), jnp.float32)
        return jax.pure_callback(pull, shape, anchor, ids, vmap_method="broadcast_all")

    def backward(ids: jax.Array, gradients: jax.Array) -> tuple[jax.Array, None]:
        gradients, counts = _own_share(context, gradients)
        # Not a pure callback: XLA must neither drop nor repeat it.
        zero = io_callback(
            collect, jax.ShapeDtypeStruct((1,), jnp.float32), ids, gradients, counts
        )
        return zero, None

    lookup = jax.custom_vjp(rows_of)
    lookup.defvjp(lambda anchor, ids: (rows_of(anchor, ids), ids), backward)
    return lookup


def _own_share(
    context: ReplicaContext | None, gradients: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scale a replica's gradients so that their sum over replicas is the step's.

    Also returns whether this replica counts in the step.
    """
    if context is None:
        return gradients, jnp.asarray(True)
    counts = context.counted(jnp.asarray(True))
    return context.counted(gradients) / context.loss_scale, counts
