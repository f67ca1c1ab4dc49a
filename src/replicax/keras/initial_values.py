"""Initial values of sharded variables: each device computes its own shard.

Keras computes a whole variable on one device, whose memory may be too small for it.
"""

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped
from jax.typing import DTypeLike

from replicax._util.types import PyTree, Shape
from replicax.engine.layouts import FEWEST_ELEMENTS

__all__ = ["computed_in_shards"]


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
    is_of_keras = type(initializer).__module__.startswith("keras.")
    if not is_of_keras or not isinstance(getattr(initializer, "seed", 0), int):
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
