"""`OptaxOptimizer`: an Optax transformation as an optimizer for Keras models."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import keras
from jax.typing import DTypeLike

from replicax._private.keras import (
    UpdatesTogether,
    inner_of,
    stored_dtype,
    trained_by,
)
from replicax._util.types import PyTree, Shape
from replicax.engine.composites import is_key
from replicax.jax_loops.optax import Transformation, as_transformation, is_distributed

if TYPE_CHECKING:
    import optax

__all__ = ["OptaxOptimizer", "rate_of"]


class OptaxOptimizer(UpdatesTogether, keras.optimizers.Optimizer):
    """A Keras optimizer whose update is that of an Optax transformation.

    For `compile` and `fit`, with a strategy or without, and for steps that call
    `optimizer.apply`. The transformation gets all trainable variables together, as a
    dict of arrays by the variables' paths, such as `"dense/kernel"`: masks and labels
    may use the names. Its state is in Keras variables, so strategies shard it and
    checkpoints save it.

    `optimizer.learning_rate`, and callbacks that read or set it, work if `tx` is
    `optax.inject_hyperparams(...)(learning_rate=number)`; otherwise they raise.
    A transformation cannot be written to a file: save `model.save_weights` or
    `rx.Checkpoint(model=model)`. To save whole models, register a subclass with
    `keras.saving.register_keras_serializable()` that makes `tx` from numbers in its
    `__init__` and returns these from `get_config`.

    Args:
        tx: The transformation, such as `optax.adamw(1e-3)`. It must not ask for extra
            arguments of `update`, and not be wrapped in `rx.distributed`: Keras
            optimizers combine gradients already.
        name: Name of the optimizer.
        options: Keras' options for all optimizers: `clipnorm`, `clipvalue`,
            `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor`, `gradient_accumulation_steps`.

    Raises:
        TypeError: For another `tx` or option; in `apply`, for a transformation that
            needs extra arguments, or whose state changes its structure.
        NotImplementedError: When it is built under a `ParameterServerStrategy`.
        ValueError: In `apply`, if a variable has no gradient.

    Example:
        >>> import keras, numpy as np, optax, replicax as rx
        >>> strategy = rx.MirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(rx.OptaxOptimizer(optax.adamw(1e-3)), loss="mse")
        >>> x, y = np.ones((8, 4)), np.zeros((8, 1))
        >>> history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        >>> first, second = history.history["loss"]
        >>> second < first
        True
    """

    def __init__(
        self, tx: "optax.GradientTransformation", *, name: str = "optax", **options: Any
    ) -> None:
        unknown = options.keys() - _OPTIONS
        if unknown:
            raise TypeError(
                f"OptaxOptimizer: got options {sorted(unknown)}, expected some of "
                f"{list(_OPTIONS)}. Learning rates and weight decay are arguments of "
                "Optax' transformations, such as optax.adamw(1e-3, weight_decay=0.01)."
            )
        # A callable, so that Keras makes no variable for a rate.
        super().__init__(learning_rate=_UnknownRate, name=name, **options)
        self._tx = as_transformation(tx, "OptaxOptimizer")
        if is_distributed(self._tx):
            raise TypeError(
                "OptaxOptimizer: tx is a result of rx.distributed, but Keras "
                "optimizers combine gradients already. Pass the transformation itself."
            )
        self._names: list[str] = []  # Of the trainable variables; unique.
        self._key_impls: list[str | None] = []  # Of each leaf; None: no random key.
        self._slots: list[keras.Variable] = []
        self._structure = jax.tree.structure(None)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the variables of the state, for the given trainable variables."""
        if self.built:
            return
        super().build(variables)
        paths = [v.path for v in variables]
        self._names = [
            path if paths.index(path) == i else f"{path}:{i}"
            for i, path in enumerate(paths)
        ]
        by_name = dict(zip(self._names, variables, strict=True))
        shapes = {
            k: jax.ShapeDtypeStruct(tuple(v.shape), stored_dtype(v))
            for k, v in by_name.items()
        }
        impls = self._key_impls

        def init(params: PyTree) -> PyTree:
            state = self._tx.init(params)
            impls[:] = [_impl_of(x) for x in jax.tree.leaves(state)]
            return state

        state = jax.eval_shape(init, shapes)
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(state)
        initializer = _initializer_of_leaves(self._tx, by_name)
        for number, (path, leaf) in enumerate(leaves):
            name = getattr(path[-1], "key", None) if path else None
            variable = by_name.get(name) if isinstance(name, str) else None
            initial = functools.partial(initializer, number)
            self._slots.append(self._slot(path, leaf, variable, initial))

    def _slot(
        self,
        path: tuple[Any, ...],
        leaf: jax.ShapeDtypeStruct,
        variable: keras.Variable | None,
        initializer: PyTree,  # A callable, though Keras declares a string.
    ) -> keras.Variable:
        """Create a leaf's variable, which is sharded like other slots of its weight."""
        if variable is not None and leaf.shape == tuple(variable.shape):
            reference = types.SimpleNamespace(
                path=variable.path, shape=leaf.shape, dtype=leaf.dtype.name
            )
            slot = self.add_variable_from_reference(
                reference, _name_of(path[:-1]), initializer
            )
        else:
            data = jax.eval_shape(_stored, leaf)
            slot = self.add_variable(
                data.shape, initializer, data.dtype.name, name=_name_of(path)
            )
        if slot is None:
            raise NotImplementedError(
                f"{self.name}: the optimizer state of this strategy is on parameter "
                "servers, which make updates of Keras' own optimizers only. Use one "
                "of these, or rx.MultiWorkerMirroredStrategy."
            )
        return slot

    def update_together(
        self, gradients: Sequence[jax.Array], variables: Sequence[keras.Variable]
    ) -> None:
        """Update the variables, with gradients that Keras has combined and clipped."""
        import optax

        trained = trained_by(self)
        gradient_of = dict(zip(map(id, variables), gradients, strict=True))
        missing = [v.path for v in trained if id(v) not in gradient_of]
        if missing:
            raise ValueError(
                f"{self.name}: variables {missing} have no gradient. Optax updates all "
                "variables of an optimizer together: set trainable = False on their "
                "layers before compile, or give them an optimizer of their own."
            )
        params = {k: v.value for k, v in zip(self._names, trained, strict=True)}
        grads = {
            k: gradient_of[id(v)] for k, v in zip(self._names, trained, strict=True)
        }
        pairs = zip(self._slots, self._key_impls, strict=True)
        state = self._structure.unflatten(_restored(v.value, impl) for v, impl in pairs)
        updates, state = self._tx.update(grads, state, params)
        if jax.tree.structure(state) != self._structure:
            raise TypeError(
                f"{self.name}: an update changes the structure of the optimizer state "
                f"from {self._structure} to {jax.tree.structure(state)}, so it cannot "
                "be kept in variables."
            )
        new: PyTree = optax.apply_updates(params, updates)
        for key, variable in zip(self._names, trained, strict=True):
            variable.assign(new[key])
        for slot, leaf in zip(self._slots, jax.tree.leaves(state), strict=True):
            slot.assign(_stored(leaf))

    @property
    def learning_rate(self) -> Any:
        """The variable of an injected learning rate, else an object without value."""
        variable = self._rate()
        return _UnknownRate(self) if variable is None else variable

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        variable = self._rate()
        if variable is None:
            raise _UnknownRate(self).error()
        variable.assign(value)

    def _rate(self) -> keras.Variable | None:
        """The variable of a rate that `optax.inject_hyperparams` reads, if any."""
        indices: PyTree = self._structure.unflatten(range(len(self._slots)))
        nodes: list[Any] = jax.tree.leaves(indices, is_leaf=_is_injected)
        nodes = [x for x in nodes if _is_injected(x) and _RATE in x.hyperparams]
        # A schedule would overwrite a value that is set.
        if len(nodes) != 1 or _RATE in nodes[0].hyperparams_states:
            return None
        index: int = nodes[0].hyperparams[_RATE]
        return self._slots[index]

    def get_config(self) -> dict[str, Any]:
        """The name and Keras' options, for subclasses that can make their `tx` anew."""
        if type(self) is OptaxOptimizer:
            raise NotImplementedError(
                f"{self.name}: an Optax transformation cannot be written to a file. "
                "Save model.save_weights(path), or rx.Checkpoint(model=model), which "
                "has the optimizer state. To save whole models, register a subclass "
                "with keras.saving.register_keras_serializable() that makes its "
                "transformation from numbers in __init__, and returns these, and "
                "super().get_config(), from get_config."
            )
        return {"name": self.name} | {x: getattr(self, x) for x in _OPTIONS}


_RATE = "learning_rate"
_OPTIONS = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


class _UnknownRate:
    """Stands for a learning rate inside a transformation; has no value to read."""

    def __init__(self, optimizer: OptaxOptimizer) -> None:
        self._name = optimizer.name
        self._is_built = optimizer.built

    def error(self) -> TypeError:
        """The error of reading or setting it."""
        if not self._is_built:
            return TypeError(
                f"{self._name}: the learning rate is not known before the optimizer is "
                "built. Build the model first, with a keras.Input or model.build, and "
                "call optimizer.build(model.trainable_variables)."
            )
        return TypeError(
            f"{self._name}: the learning rate is inside the Optax transformation, "
            "where it cannot be read or set. To do so, or to use callbacks such as "
            "ReduceLROnPlateau, make the optimizer with rx.OptaxOptimizer("
            "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)), where the rate "
            "is a number and no schedule."
        )

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise self.error()

    __float__ = __array__


def rate_of(optimizer: keras.optimizers.Optimizer) -> PyTree:
    """The current learning rate of a Keras optimizer; None if it is not known."""
    rate: Any = inner_of(optimizer).learning_rate
    return None if isinstance(rate, _UnknownRate) else rate


def _initializer_of_leaves(
    tx: Transformation, variables: dict[str, keras.Variable]
) -> Callable[..., jax.Array]:
    """An initializer of the state's leaves, called with a leaf's number.

    The first call computes the initial state. For variables that are created in a
    trace, Keras calls it after the trace, when weights have values.
    """
    values: dict[int, jax.Array] = {}

    def initializer(
        number: int, shape: Shape, dtype: DTypeLike | None = None
    ) -> jax.Array:
        if number not in values:
            params = {k: v.value for k, v in variables.items()}
            values.update(enumerate(jax.tree.leaves(tx.init(params))))
        # A copy: a state may hold the weights' own arrays, which steps donate.
        return jnp.array(_stored(values.pop(number)), dtype, copy=True)

    return initializer


def _is_injected(state: object) -> bool:
    return hasattr(state, "hyperparams_states")


def _stored(leaf: jax.Array) -> jax.Array:
    """A leaf as a variable holds it: random keys are arrays of numbers."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _impl_of(leaf: jax.Array) -> str | None:
    return str(jax.random.key_impl(leaf)) if is_key(leaf) else None


def _restored(value: jax.Array, impl: str | None) -> jax.Array:
    return value if impl is None else jax.random.wrap_key_data(value, impl=impl)


def _name_of(path: tuple[Any, ...]) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator="_")
    return name.replace("/", "_") or "state"
