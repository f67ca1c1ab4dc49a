"""Sums over the replicas that hold examples of the batch: they *count* in the step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from replicax._util.types import PyTree
from replicax.engine.checks.divergence import declare_mirrored
from replicax.engine.collectives import ReduceOp
from replicax.engine.group import ReplicaGroup

__all__ = ["CountedReplicas"]


class CountedReplicas:
    """The replicas of a step, of which only some may hold examples of the batch."""

    def __init__(
        self, group: ReplicaGroup, gradient_op: ReduceOp, num_active: int | None
    ) -> None:
        """Take the arguments of `ReplicaContext`."""
        self._group = group
        self._gradient_op = gradient_op
        self._num_active = num_active

    @property
    def loss_scale(self) -> int:
        """Factor on a replica's share of the global loss.

        `num_counted` where gradients are averaged, else 1.
        """
        return self.num_counted if self._gradient_op is ReduceOp.MEAN else 1

    def mapped(
        self, fn: Callable[..., PyTree], in_axes: PyTree, out_axes: PyTree
    ) -> Callable[..., PyTree]:
        """Map `fn` over the replicas of a device, as the step is mapped."""
        return self._group.mapped(fn, in_axes, out_axes)

    @property
    def num_replicas_here(self) -> int:
        """Number of replicas that this program's collectives join."""
        return self._group.num_replicas

    @property
    def replica_id_here(self) -> jax.Array:
        """This replica's number among those of this program."""
        return self._group.index()

    @property
    def num_counted(self) -> int:
        """Number of replicas whose examples count in this step."""
        return self._num_active or self._group.num_replicas

    def counted(self, tree: PyTree) -> PyTree:
        """`tree` on replicas that count, zeros on the others."""
        return self._where_counted(tree, jnp.zeros_like)

    def _where_counted(
        self, tree: PyTree, other: Callable[[jax.Array], jax.Array]
    ) -> PyTree:
        if self._num_active is None:
            return tree
        counts = self._group.index() < self._num_active
        return jax.tree.map(lambda x: jnp.where(counts, x, other(x)), tree)

    def sum(self, tree: PyTree) -> PyTree:
        """Sum over the replicas that count, with XLA's all-reduce.

        Gradients through the sum are those of the losses that count, too.
        """
        return self.of_counted_losses(self._group.sum(self.counted(tree)))

    def of_counted_losses(self, tree: PyTree) -> PyTree:
        """The same arrays, without gradients from replicas that do not count."""
        # Those replicas compute losses on copies of examples. Backward through an
        # all-reduce, their gradients would be added to the others'.
        tree = self._where_counted(tree, lax.stop_gradient)
        return tree if self._num_active is None else declare_mirrored(tree)

    def mean(self, tree: PyTree) -> PyTree:
        """Mean over the replicas that count."""
        return jax.tree.map(lambda x: x / self.num_counted, self.sum(tree))

    def summand(self, value: jax.Array) -> jax.Array:
        """This replica's part of a value; the parts that count sum to it exactly.

        Parts are equal, and the first replica adds the remainder. They are rounded to
        fewer bits, so that sums of parts need no rounding in any order.
        """
        num = self.num_counted
        if num == 1:
            return value
        if jnp.issubdtype(value.dtype, jnp.floating):
            info = jnp.finfo(value.dtype)
            kept = max(1, info.nmant - 2 * num.bit_length())
            part = lax.reduce_precision(value / num, info.nexp, kept)
            # The remainder of infinity would be NaN.
            part = jnp.where(jnp.isfinite(value), part, 0)
        else:
            part = value // num
        is_first = self._group.index() == 0
        return jnp.where(is_first, value - (num - 1) * part, part)

    def first(self, tree: PyTree) -> PyTree:
        """The first replica's value, on all replicas."""
        return jax.tree.map(lambda x: self._group.stacked(x)[0], tree)

    def sum_by_operations(self, tree: PyTree) -> PyTree:
        """Sum over all replicas, with the user's cross-device operations."""
        tree = self._group.sum_on_device(tree)
        if self._group.axis.size == 1:
            return tree
        return self._group.cross_device_ops.reduce(ReduceOp.SUM, tree, self._group.axis)
