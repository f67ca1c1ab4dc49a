"""Sharded weights of a replica: blocks, all-gathers and their rematerialisation.

A step gathers each sharded weight before using it. If JAX saved gathered weights for
the backward pass, every device would hold all layers' whole weights at once. So gathers
are inside the function that is differentiated, and `jax.checkpoint` repeats them in the
backward pass.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Primitive, jaxpr_as_fun
from jax.typing import ArrayLike

from replicax._private.jax import equation_of
from replicax._util.types import PyTree
from replicax.engine.jaxprs import Atom
from replicax.engine.replica_axis import ReplicaAxis
from replicax.engine.scope import current_context, required_context

__all__ = [
    "Block",
    "BlockedValues",
    "cut",
    "gathered_here",
    "primal_of",
    "regathered",
    "regathering",
    "replicas_hold_blocks",
]

# The backward pass recomputes these operations, which gather and convert weights. On
# activations they are cheap.
_RECOMPUTED = (
    "all_gather",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "name",
    "reshape",
    "squeeze",
    "transpose",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A replica's slice of an array along `dim`; replica `i` has the `i`-th slice."""

    data: jax.Array
    dim: int


def cut(value: jax.Array, dim: int, axis: ReplicaAxis) -> Block:
    """This replica's block of an array along dimension `dim`."""
    size = value.shape[dim] // axis.size
    start = lax.axis_index(axis.name) * size
    return Block(lax.dynamic_slice_in_dim(value, start, size, dim), dim)


class BlockedValues:
    """The arrays that one trace of a step has gathered, by id, and their blocks.

    If a step returns a gathered array unchanged, its block need not be cut again.
    """

    def __init__(self, axis: ReplicaAxis) -> None:
        self.axis = axis
        self._gathered: dict[int, tuple[jax.Array, Block]] = {}

    def whole(self, block: Block) -> jax.Array:
        """Gather a block; `block_of` returns the block of the returned array."""
        value = lax.all_gather(block.data, self.axis.name, axis=block.dim, tiled=True)
        self._gathered[id(value)] = (value, block)  # Alive, so that ids are unique.
        return value

    def block_of(self, value: jax.Array) -> Block | None:
        """The block from which `whole` gathered `value`, if any."""
        _, block = self._gathered.get(id(value), (None, None))
        return block


def replicas_hold_blocks() -> bool:
    """Whether weights are sharded in the current replica function."""
    context = current_context()
    return context is not None and context.has_split_weights


def regathering(
    fn: Callable[[list[jax.Array]], tuple[PyTree, PyTree]],
) -> Callable[[list[jax.Array]], tuple[PyTree, PyTree]]:
    """Wrap `fn`, so that JAX saves no gathered weight for the backward pass.

    `fn` must gather with `gathered_here`, and return `(differentiated, other results)`.
    """
    if not replicas_hold_blocks():
        return fn
    rematerialized = jax.checkpoint(fn, policy=_is_saved)
    if not required_context().blocked.axis.overlaps:
        return rematerialized
    return _with_backward_pass_inline(rematerialized)


def _with_backward_pass_inline(
    fn: Callable[[list[jax.Array]], tuple[PyTree, PyTree]],
) -> Callable[[list[jax.Array]], tuple[PyTree, PyTree]]:
    """Inline the equations of a rematerialised function's backward pass.

    JAX traces this pass as one equation after a barrier: XLA could not fuse its
    operations with others, and `overlap` could not see the order of gradients. Only the
    gathers need a barrier, or XLA would merge them with those of the forward pass.
    """

    def forward(values: list[jax.Array]) -> tuple[PyTree, PyTree]:
        target, pullback, rest = jax.vjp(fn, values, has_aux=True)
        return (target, rest), (target, pullback)

    def backward(saved: PyTree, cotangents: PyTree) -> tuple[list[ArrayLike]]:
        target, pullback = saved
        (shapes,) = jax.eval_shape(pullback, cotangents[0])
        are_floats = [x.dtype != jax.dtypes.float0 for x in shapes]

        def float_gradients() -> list[jax.Array]:
            (gradients,) = pullback(cotangents[0])
            return list(itertools.compress(gradients, are_floats))

        grads = iter(_evaluate_inline(jax.make_jaxpr(float_gradients)(), target))
        return (
            [
                next(grads) if is_float else np.zeros(x.shape, x.dtype)
                for x, is_float in zip(shapes, are_floats, strict=True)
            ],
        )

    inline = jax.custom_vjp(fn)
    inline.defvjp(forward, backward)
    return inline


def _evaluate_inline(closed: ClosedJaxpr, target: PyTree) -> list[jax.Array]:
    """Evaluate a backward pass inline; its gathers wait for `target`, the loss."""
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def value_of(atom: Atom) -> jax.Array:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        values = [value_of(x) for x in eqn.invars]
        if eqn.params.get("policy") is _is_saved:
            body = eqn.params["jaxpr"]
            gathers = [e for e in body.eqns if e.primitive.name == "all_gather"]
            blocks = {e.invars[0] for e in gathers}
            waiting = {i: values[i] for i, v in enumerate(body.invars) if v in blocks}
            waiting, _ = lax.optimization_barrier((waiting, target))
            values = [waiting.get(i, x) for i, x in enumerate(values)]
            results = jaxpr_as_fun(ClosedJaxpr(body, ()))(*values)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            results = eqn.primitive.bind(*values, **params)
            results = results if eqn.primitive.multiple_results else [results]
        env |= zip(eqn.outvars, results, strict=True)
    return [value_of(x) for x in closed.jaxpr.outvars]


def _is_saved(primitive: Primitive, *_: object, **__: object) -> bool:
    return primitive.name not in _RECOMPUTED


def gathered_here(
    values: Iterable[jax.Array], wholes: Sequence[jax.Array]
) -> list[jax.Array]:
    """Gather sharded weights inside the function that is differentiated.

    `values` are the weights as arguments of that function, to which gradients flow;
    `wholes` are the same weights outside of it, by which their blocks are found.
    """
    if not replicas_hold_blocks():
        return list(values)
    blocked = required_context().blocked
    blocks = map(blocked.block_of, wholes)
    return [
        x if block is None else _gathered(x, block.data, block.dim, blocked.axis.name)
        for x, block in zip(values, blocks, strict=True)
    ]


def regathered(targets: Sequence[jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A function that gathers again a weight that the forward pass has gathered.

    It also recomputes arrays that are cheaply computed from gathered weights, and
    returns others unchanged. The gathers wait for `targets`, the results of that pass.
    """
    again: dict[int, tuple[jax.Array, jax.Array]] = {}
    if not replicas_hold_blocks():
        return lambda array: array
    blocked = required_context().blocked

    def gathered(array: jax.Array) -> jax.Array:
        if id(array) not in again:
            again[id(array)] = array, computed(array)
        return again[id(array)][1]

    def computed(array: jax.Array) -> jax.Array:
        block, equation = blocked.block_of(array), equation_of(array)
        if block is not None:
            # Else XLA would merge it with the gather of the forward pass.
            data, _ = lax.optimization_barrier((block.data, targets))
            name = blocked.axis.name
            return lax.all_gather(data, name, axis=block.dim, tiled=True)
        if equation is None or equation.primitive.name not in _RECOMPUTED:
            return array
        inputs = list(map(gathered, equation.in_tracers))
        if all(map(operator.is_, inputs, equation.in_tracers)):
            return array
        return equation.primitive.bind(*inputs, **equation.params)

    return gathered


def primal_of(value: jax.Array) -> jax.Array:
    """The array inside JAX's differentiation tracers."""
    while (primal := getattr(value, "primal", None)) is not None:
        value = primal
    return value


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gathered(value: jax.Array, data: jax.Array, dim: int, axis_name: str) -> jax.Array:
    """Gather `data`, the block of `value`; the gradient flows to `value`."""
    return _forward(value, data, dim, axis_name)[0]


def _forward(
    value: jax.Array, data: jax.Array, dim: int, axis_name: str
) -> tuple[jax.Array, None]:
    del value
    # A call of `_gathered` would hide the all-gather from `_is_saved`.
    return lax.all_gather(data, axis_name, axis=dim, tiled=True), None


def _backward(
    dim: int, axis_name: str, _: None, gradient: jax.Array
) -> tuple[jax.Array, None]:
    del dim, axis_name
    return gradient, None


_gathered.defvjp(_forward, _backward)
