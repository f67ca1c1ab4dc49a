"""Initial values of variables, with the bits that Keras computes.

Keras compiles a program for each shape. Here small mirrored variables share programs.
Keras computes a whole variable on one device, whose memory may be too small for it.
Here each device computes its own shard of a sharded variable.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Generator, Hashable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped
from jax.typing import DTypeLike

from replicax._private.wraps import Original
from replicax._util.types import PyTree, Shape
from replicax.engine.layouts import FEWEST_ELEMENTS

__all__ = ["computed_in_shards", "draw", "is_small", "small_value"]

# XLA takes 0.2 s and more to compile random numbers of one shape.
_SIZES = [4**i for i in range(6, 12)]

_of_thread = threading.local()


def is_small(shape: Shape) -> bool:
    """Whether `small_value` computes a variable of this shape."""
    return math.prod(shape) <= _SIZES[-1]


def small_value(
    initializer: Callable[..., PyTree], shape: Shape, dtype: DTypeLike
) -> PyTree:
    """Return `initializer(shape, dtype)`; None for one that is not Keras' own."""
    if not _is_of_keras(initializer):
        return None
    if type(initializer) in (keras.initializers.Zeros, keras.initializers.Ones):
        is_one = type(initializer) is keras.initializers.Ones
        return jax.device_put(np.full(shape, is_one, jnp.dtype(dtype)))
    with _drawing_by_size():
        return initializer(shape, dtype=dtype)


@contextlib.contextmanager
def _drawing_by_size() -> Generator[None]:
    _of_thread.draws_by_size = True
    try:
        yield
    finally:
        _of_thread.draws_by_size = False


def draw(original: Original, shape: Shape, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """The hook of Keras' random numbers: cut an array of one of few sizes.

    JAX computes element `i` from the key and `i`, so a larger array starts with the
    same numbers; its other generators than Threefry do not.
    """
    if not getattr(_of_thread, "draws_by_size", False):
        return original(shape, *args, **kwargs)
    options = jax.config.values
    if (
        options["jax_default_prng_impl"] != "threefry2x32"
        or not options.get("jax_threefry_partitionable", True)
        or not is_small(shape)
    ):
        return original(shape, *args, **kwargs)
    size = math.prod(shape)
    larger = next(n for n in _SIZES if n >= size)
    numbers = original((larger,), *args, **kwargs)
    if isinstance(numbers, jax.core.Tracer):
        return numbers[:size].reshape(shape)
    # On the host: JAX would compile the cut. A copy: JAX may keep the memory.
    return jax.device_put(np.array(np.asarray(numbers)[:size].reshape(shape)))


def _is_of_keras(initializer: Callable[..., PyTree]) -> bool:
    return type(initializer).__module__.startswith("keras.")


def computed_in_shards(
    initializer: Callable[..., PyTree],
    shape: Shape,
    dtype: DTypeLike,
    layout: NamedSharding,
) -> jax.Array | None:
    """Return `initializer(shape, dtype)` in a sharding, with the same bits.

    None for initializers that compute another large array, such as `Orthogonal`, and
    for users' initializers, whose code may have effects that a trace would lose.
    """
    if not _is_of_keras(initializer) or not isinstance(
        getattr(initializer, "seed", 0), int
    ):
        return None
    closed = jax.make_jaxpr(lambda: initializer(shape, dtype=dtype))()
    equations, (result,) = closed.jaxpr.eqns, closed.jaxpr.outvars
    created = [var for equation in equations for var in equation.outvars]
    if result not in created or any(
        _is_large_of_other_shape(var.aval, shape) for var in created
    ):
        return None
    values: dict[Any, PyTree] = dict(
        zip(closed.jaxpr.constvars, map(np.asarray, closed.consts), strict=True)
    )
    last_uses = {var: i for i, e in enumerate(equations) for var in _read_by(e)}
    # XLA would round differently if it fused equations, so each is a program of its
    # own, as without `jit`. Literals are arguments, so that initializers share it.
    for i, equation in enumerate(equations):
        inputs = [
            _array_of(x) if isinstance(x, Literal) else values[x]
            for x in equation.invars
        ]
        specs = [
            layout.spec if var.aval.shape == shape else PartitionSpec()
            for var in equation.outvars
        ]
        program = _program_of(
            equation.primitive,
            tuple(equation.params.items()),
            tuple(NamedSharding(layout.mesh, spec) for spec in specs),
        )
        values |= zip(equation.outvars, program(*inputs), strict=True)
        for var in _read_by(equation):
            if last_uses[var] == i:
                del values[var]
    return values[result]


def _array_of(literal: Literal) -> np.ndarray:
    aval: Any = literal.aval
    return np.asarray(literal.val, aval.dtype)


def _read_by(equation: JaxprEqn) -> set[Any]:
    return {x for x in equation.invars if not isinstance(x, Literal)}


def _is_large_of_other_shape(aval: Any, shape: Shape) -> bool:
    return aval.shape != shape and math.prod(aval.shape) >= FEWEST_ELEMENTS


@functools.lru_cache(maxsize=128)
def _program_of(
    primitive: Primitive,
    params: tuple[tuple[str, Hashable], ...],
    shardings: tuple[NamedSharding, ...],
) -> Wrapped:
    """Compile one equation. Cached, since JAX compiles each new function again."""

    def program(*inputs: jax.Array) -> list[jax.Array]:
        outputs = primitive.bind(*inputs, **primitive.get_bind_params(dict(params)))
        return outputs if primitive.multiple_results else [outputs]

    return jax.jit(program, out_shardings=list(shardings))
