"""Arrays of which each replica has a block, and computations carried out on blocks.

An optimizer's update is written for whole arrays. Almost all of it is elementwise, so
replicas can each make a part: `on_blocks` carries out a traced computation with the
blocks that a replica has. Sums and maxima over a whole array become collectives, so
norms and clipping stay right. What cannot be done on blocks is done on the whole, which
is right as well, and costs what it would have cost.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core

from replicax.engine.collectives import ReplicaAxis

__all__ = ["Block", "BlockedValues", "cut", "on_blocks", "whole"]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A replica's part of an array.

    Attributes:
        data: The part.
        dim: The dimension along which the replicas' parts follow each other.
    """

    data: jax.Array
    dim: int


MaybeBlock: TypeAlias = jax.Array | Block
AnyJaxpr: TypeAlias = jex_core.Jaxpr | jex_core.ClosedJaxpr
Atom: TypeAlias = jex_core.Var | jex_core.Literal


def whole(value: MaybeBlock, axis: ReplicaAxis) -> jax.Array:
    """The array that a `Block` is a part of; an array itself."""
    if not isinstance(value, Block):
        return value
    return lax.all_gather(value.data, axis.name, axis=value.dim, tiled=True)


def cut(value: MaybeBlock, dim: int, axis: ReplicaAxis) -> Block:
    """This replica's part of an array along dimension `dim`."""
    if isinstance(value, Block):
        if value.dim == dim:
            return value
        value = whole(value, axis)
    size = value.shape[dim] // axis.size
    start = lax.axis_index(axis.name) * size
    return Block(lax.dynamic_slice_in_dim(value, start, size, dim), dim)


class BlockedValues:
    """The whole arrays of a step that are known to be made of certain blocks.

    So a whole array that is handed on, unchanged, need not be cut again.

    Invariant: an array is known by its identity within one trace, that of the context
    which holds this object. `whole` keeps each array that it returns, so no other can
    get its id. Whoever computes with an array, even `x + 0`, has another one, which is
    not known and is cut: slower, and never wrong. A retrace has new arrays and a new
    context, and so starts with none.

    Args:
        axis: The replicas' devices.
    """

    def __init__(self, axis: ReplicaAxis) -> None:
        self.axis = axis
        self._known: dict[int, tuple[jax.Array, Block]] = {}

    def whole(self, block: Block) -> jax.Array:
        """The whole of a block, which `block_of` will know."""
        value = whole(block, self.axis)
        self._known[id(value)] = (value, block)  # Kept, or the id could be another's.
        return value

    def block_of(self, value: jax.Array) -> Block | None:
        """The block that is known for a whole array, if any."""
        known = self._known.get(id(value))
        return None if known is None else known[1]


def on_blocks(
    fn: Callable[..., Sequence[jax.Array]],
    args: Sequence[MaybeBlock],
    axis: ReplicaAxis,
) -> Sequence[MaybeBlock]:
    """Carry out `fn(*whole arrays)` on blocks.

    Args:
        fn: Takes whole arrays and returns a list of arrays.
        args: Arrays, equal on all replicas, and `Block`s.
        axis: The replicas' devices.

    Returns:
        Arrays, equal on all replicas, and `Block`s.
    """
    shapes = [_whole_shape(x, axis) for x in args]
    closed = jax.make_jaxpr(fn)(*shapes)
    return _Evaluation(axis, closed.jaxpr).jaxpr(closed.jaxpr, closed.consts, args)


def _whole_shape(value: MaybeBlock, axis: ReplicaAxis) -> jax.ShapeDtypeStruct:
    data = value.data if isinstance(value, Block) else value
    shape = list(data.shape)
    if isinstance(value, Block):
        shape[value.dim] *= axis.size
    aval = jax.typeof(data)
    return jax.ShapeDtypeStruct(
        tuple(shape), data.dtype, weak_type=getattr(aval, "weak_type", False)
    )


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# By name: the objects are spread over JAX's private modules.
_ELEMENTWISE = _words(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min
    mul name ne neg nextafter not or population_count pow real reduce_precision rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square stop_gradient sub tan tanh xor
    """
)

_CALLS = _words(
    """
    jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr
    """
)

# Of parts they are made of the parts' own.
_REDUCTIONS = _words(
    "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
)


class _Evaluation:
    def __init__(self, axis: ReplicaAxis, origin: jex_core.Jaxpr) -> None:
        self._axis = axis
        self._origin = origin  # The jaxpr, of which others are made.

    def jaxpr(
        self,
        jaxpr: jex_core.Jaxpr,
        consts: Sequence[jax.Array],
        args: Sequence[MaybeBlock],
    ) -> Sequence[MaybeBlock]:
        known: dict[jex_core.Var, MaybeBlock] = {}
        known |= zip(jaxpr.constvars, consts, strict=True)
        known |= zip(jaxpr.invars, args, strict=True)

        def of(atom: Atom) -> MaybeBlock:
            return atom.val if isinstance(atom, jex_core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [of(a) for a in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [of(a) for a in jaxpr.outvars]

    def _equation(
        self, eqn: jex_core.JaxprEqn, args: Sequence[MaybeBlock]
    ) -> Sequence[MaybeBlock]:
        name = eqn.primitive.name
        if name in _CALLS:
            closed = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            return self.jaxpr(*_opened(closed), args)
        arrays = [x for x in args if not isinstance(x, Block)]
        if len(arrays) == len(args):
            return self._bind(eqn, arrays)
        if name in _ELEMENTWISE:
            return self._elementwise(eqn, args)
        if name == "cond":
            return self._cond(eqn, args)
        if len(args) == 1 and isinstance(args[0], Block):
            return self._of_block(eqn, args[0])
        return self._bind(eqn, [whole(x, self._axis) for x in args])

    def _of_block(self, eqn: jex_core.JaxprEqn, block: Block) -> Sequence[MaybeBlock]:
        """The results of a primitive that takes one array."""
        name = eqn.primitive.name
        if name in _REDUCTIONS:
            return self._reduction(eqn, block)
        if name == "broadcast_in_dim":
            dims, shape = eqn.params["broadcast_dimensions"], list(eqn.params["shape"])
            dim = dims[block.dim]
            shape[dim] //= self._axis.size
            return [Block(lax.broadcast_in_dim(block.data, shape, dims), dim)]
        if name == "transpose":
            (data,) = self._bind(eqn, [block.data])
            return [Block(data, eqn.params["permutation"].index(block.dim))]
        return self._bind(eqn, [whole(block, self._axis)])

    def _elementwise(
        self, eqn: jex_core.JaxprEqn, args: Sequence[MaybeBlock]
    ) -> Sequence[MaybeBlock]:
        dim = next(x.dim for x in args if isinstance(x, Block))
        parts = [self._part(x, dim) for x in args]
        return [Block(x, dim) for x in self._bind(eqn, parts)]

    def _part(self, value: MaybeBlock, dim: int) -> jax.Array:
        """What goes with the blocks along `dim` of the other operands."""
        if isinstance(value, Block) and value.dim == dim:
            return value.data
        # Scalars, such as the bounds of a clamp, go with every element, and so does
        # what has one element along the dimension.
        if jnp.ndim(_data(value)) == 0 or _data(value).shape[dim] == 1:
            return whole(value, self._axis)
        return cut(value, dim, self._axis).data

    def _reduction(self, eqn: jex_core.JaxprEqn, block: Block) -> Sequence[MaybeBlock]:
        axes = eqn.params["axes"]
        (data,) = self._bind(eqn, [block.data])
        if block.dim not in axes:
            return [Block(data, block.dim - sum(a < block.dim for a in axes))]
        if eqn.primitive.name == "reduce_sum":
            return [lax.psum(data, self._axis.name)]
        # XLA's own maximum over devices forgets NaN on CPUs.
        parts = lax.all_gather(data, self._axis.name)
        return [eqn.primitive.bind(parts, **eqn.params | {"axes": (0,)})]

    def _cond(
        self, eqn: jex_core.JaxprEqn, args: Sequence[MaybeBlock]
    ) -> Sequence[MaybeBlock]:
        choice, *operands = args
        dims: list[int | None] = [None] * len(eqn.outvars)

        def branch(closed: jex_core.ClosedJaxpr) -> Callable[..., list[jax.Array]]:
            def run(*data: jax.Array) -> list[jax.Array]:
                given = [
                    Block(x, old.dim) if isinstance(old, Block) else x
                    for x, old in zip(data, operands, strict=True)
                ]
                results = self.jaxpr(*_opened(closed), given)
                for i, x in enumerate(results):
                    if dims[i] is None and isinstance(x, Block):
                        dims[i] = x.dim
                return [
                    _data(x if dim is None else cut(x, dim, self._axis))
                    for x, dim in zip(results, dims, strict=True)
                ]

            return run

        branches = [branch(closed) for closed in eqn.params["branches"]]
        data = [_data(x) for x in operands]
        for run in branches:  # Now `dims` has what any branch returns in blocks.
            jax.eval_shape(run, *data)
        results = lax.switch(whole(choice, self._axis), branches, *data)
        return [
            x if dim is None else Block(x, dim)
            for x, dim in zip(results, dims, strict=True)
        ]

    def _bind(
        self, eqn: jex_core.JaxprEqn, args: Sequence[jax.Array]
    ) -> list[jax.Array]:
        if any(
            isinstance(x, jex_core.Jaxpr | jex_core.ClosedJaxpr) for x in _flat(eqn)
        ):
            return self._bind_with_functions(eqn, args)
        results = eqn.primitive.bind(*args, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [results]

    def _bind_with_functions(
        self, eqn: jex_core.JaxprEqn, args: Sequence[jax.Array]
    ) -> list[jax.Array]:
        # How functions are given to a primitive is JAX's own affair.
        given = {
            a: x
            for a, x in zip(eqn.invars, args, strict=True)
            if not isinstance(a, jex_core.Literal)
        }
        jaxpr = self._origin.replace(
            constvars=[],
            invars=list(given),
            outvars=eqn.outvars,
            eqns=[eqn],
            effects=eqn.effects,
            debug_info=self._origin.debug_info.with_unknown_names(),
        )
        closed = jex_core.ClosedJaxpr(jaxpr, ())
        return jex_core.jaxpr_as_fun(closed)(*given.values())


def _data(value: MaybeBlock) -> jax.Array:
    return value.data if isinstance(value, Block) else value


def _opened(jaxpr: AnyJaxpr) -> tuple[jex_core.Jaxpr, Sequence[jax.Array]]:
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def _flat(eqn: jex_core.JaxprEqn) -> list[object]:
    return jax.tree.leaves(list(eqn.params.values()))
