"""Sums over the replicas that *count* in a step: those with examples of the batch."""

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax import lax

from replicax._util.types import PyTree
from replicax.engine.aggregation import Combine
from replicax.engine.cache import Identity
from replicax.engine.checks.divergence import declare_mirrored
from replicax.engine.collectives import ReduceOp
from replicax.engine.group import ReplicaGroup

__all__ = ["CountedReplicas"]


class CountedReplicas:
    """The replicas of a step; replicas that compute on copies do not count."""

    def __init__(
        self, group: ReplicaGroup, gradient_op: ReduceOp, num_active: int | None
    ) -> None:
        """See `ReplicaContext` for the arguments."""
        self._group = group
        self._gradient_op = gradient_op
        self._num_active = num_active

    @property
    def trace_key(self) -> Hashable:
        """A key that is equal for contexts in which a function has equal traces."""
        group, options = self._group, self._group.communication
        if group.num_replicas == 1:
            return None
        return (
            group.num_replicas,
            group.num_per_device,
            self._gradient_op,
            self._num_active,
            options.bytes_per_pack,
            options.compression,
            Identity(options.gradient_hook),
        )

    @property
    def loss_scale(self) -> int:
        """The factor on a replica's share of the global loss.

        `num_counted` if gradients are averaged, 1 if they are summed.
        """
        return self.num_counted if self._gradient_op is ReduceOp.MEAN else 1

    def mapped(
        self, fn: Callable[..., PyTree], in_axes: PyTree, out_axes: PyTree
    ) -> Callable[..., PyTree]:
        """Map `fn` over the replicas of a device, like the step itself."""
        return self._group.mapped(fn, in_axes, out_axes)

    @property
    def num_replicas_here(self) -> int:
        """Number of replicas in this program."""
        return self._group.num_replicas

    @property
    def replica_id_here(self) -> jax.Array:
        """This replica's number in this program."""
        return self._group.index()

    @property
    def replica_id_of_seeds(self) -> jax.Array:
        """This replica's number among those of all workers, for random numbers."""
        return self._group.index() + self._group.first_seed

    @property
    def num_counted(self) -> int:
        """Number of replicas that count in this step."""
        return self._num_active or self._group.num_replicas

    def counted(self, tree: PyTree) -> PyTree:
        """The same arrays on replicas that count; zeros on the others."""
        return self._where_counted(tree, jnp.zeros_like)

    def _where_counted(
        self, tree: PyTree, other: Callable[[jax.Array], jax.Array]
    ) -> PyTree:
        if self._num_active is None:
            return tree
        counts = self._group.index() < self._num_active
        return jax.tree.map(lambda x: jnp.where(counts, x, other(x)), tree)

    def sum(self, tree: PyTree) -> PyTree:
        """Sum over the replicas that count, with XLA's all-reduce."""
        return self.stop_uncounted_gradients(self._group.sum(self.counted(tree)))

    def stop_uncounted_gradients(self, tree: PyTree) -> PyTree:
        """The same arrays; replicas that do not count pass no gradients back.

        An all-reduce in the backward pass would add these gradients, of copied rows.
        """
        tree = self._where_counted(tree, lax.stop_gradient)
        return tree if self._num_active is None else declare_mirrored(tree)

    def mean(self, tree: PyTree) -> PyTree:
        """Mean over the replicas that count."""
        return jax.tree.map(lambda x: x / self.num_counted, self.sum(tree))

    def combined(self, combine: Combine, value: jax.Array) -> jax.Array:
        """`combine` of the values `[R, ...]` of the replicas that count."""
        values = self._group.stacked(value)[: self.num_counted]
        return self.stop_uncounted_gradients(combine(values))

    def summand(self, value: jax.Array) -> jax.Array:
        """This replica's summand of a value; the counted summands sum to it exactly.

        Summands are equal and rounded to fewer bits, so that their sums are exact in
        any order; the first replica adds the remainder.
        """
        num = self.num_counted
        if num == 1:
            return value
        if jnp.issubdtype(value.dtype, jnp.floating):
            info = jnp.finfo(value.dtype)
            num_bits = max(1, info.nmant - 2 * num.bit_length())
            summand = lax.reduce_precision(value / num, info.nexp, num_bits)
            # The remainder of infinity would be NaN.
            summand = jnp.where(jnp.isfinite(value), summand, 0)
        else:
            summand = value // num
        is_first = self._group.index() == 0
        return jnp.where(is_first, value - (num - 1) * summand, summand)

    def first(self, tree: PyTree) -> PyTree:
        """The first replica's value, on all replicas."""
        return jax.tree.map(lambda x: self._group.stacked(x)[0], tree)
