"""Places pytrees of arrays on a strategy's mesh, for a user's own `jax.jit`.

Legend: `R` replicas, `b` rows of one replica, `B` rows of a global batch.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.core
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped
from jax.tree_util import GetAttrKey, KeyPath

from replicax._util.arrays import dtype_on_devices, holds_numbers
from replicax._util.types import PyTree, Shape
from replicax.engine import device_put
from replicax.engine.combine import require_all_replicas
from replicax.engine.composites import is_array, require_dense
from replicax.engine.group import ReplicaGroup
from replicax.engine.values import PerReplica, is_per_replica
from replicax.input.lockstep import leaf_checksums

__all__ = [
    "MatchedRule",
    "Spec",
    "global_batch",
    "is_placeable",
    "must_exchange_rows",
    "paths_if_none_match",
    "place",
    "spec_by_path",
]

_logger = logging.getLogger("replicax")

Spec: TypeAlias = Callable[[KeyPath, PyTree], PartitionSpec]
"""The `PartitionSpec` of the array at a path of a pytree."""
MatchedRule: TypeAlias = Callable[[str, Shape], PartitionSpec | None]


def is_placeable(leaf: object) -> bool:
    """Whether a leaf is an array of numbers or keys, or the shape of one."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        return holds_numbers(leaf)
    return is_array(leaf)


def path_of(keys: KeyPath) -> str:
    """Join a path's keys, as `"layers/0/kernel"`.

    Flax's variables and boxes keep their array in an attribute `value`, which is no
    part of a weight's name.
    """
    if len(keys) > 1 and keys[-1] == GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def spec_by_path(group: ReplicaGroup, rule: MatchedRule | None) -> Spec:
    """The specs of a layout map's `rule`; for leaves without match, the group's."""

    def spec(keys: KeyPath, leaf: PyTree) -> PartitionSpec:
        matched = None if rule is None else _matched(rule, keys, leaf)
        if matched is not None:
            return matched
        return group.layouts.of_array(path_of(keys), tuple(leaf.shape))

    return spec


def _matched(rule: MatchedRule, keys: KeyPath, leaf: PyTree) -> PartitionSpec | None:
    """The spec of the longest end of a path that a rule matches; None: no match.

    So the optimizer state at `"0/mu/dense/kernel"` has the layout of the weight
    `"dense/kernel"`.
    """
    parts = path_of(keys).split("/")
    for start in range(len(parts)):
        spec = rule("/".join(parts[start:]), tuple(leaf.shape))
        if spec is not None:
            return spec
    return None


def paths_if_none_match(tree: PyTree, rule: MatchedRule) -> list[str]:
    """The paths of all arrays but scalars, if a rule matches none of them."""
    arrays = [
        (keys, leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_placeable(leaf) and leaf.shape
    ]
    if any(_matched(rule, keys, leaf) is not None for keys, leaf in arrays):
        return []
    return [path_of(keys) for keys, _ in arrays]


def place(tree: PyTree, group: ReplicaGroup, spec: Spec, caller: str) -> PyTree:
    """Place the arrays of a pytree on the group's mesh; other leaves stay.

    Workers compare the values of arrays that each worker has whole.

    Args:
        tree: The pytree. A `jax.ShapeDtypeStruct` gets its sharding. Inside `jax.jit`,
            an array gets a sharding constraint.
        group: The replicas.
        spec: The rule.
        caller: The public call, for errors.

    Raises:
        TypeError: For a `PerReplica`.
        ClusterMismatchError: If workers have different arrays.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_per_replica)
    for keys, leaf in flat:
        if isinstance(leaf, PerReplica):
            raise TypeError(
                f"{caller}: {path_of(keys) or 'the tree'} is {leaf!r}, the values of "
                "all replicas. Use strategy.global_batch for a distributed batch, and "
                "strategy.reduce or strategy.gather for a result of strategy.run."
            )
    _agree_on_values(flat, group, caller)
    return structure.unflatten(
        _placed(leaf, NamedSharding(group.mesh, spec(keys, leaf)))
        if is_placeable(leaf)
        else leaf
        for keys, leaf in flat
    )


def _placed(leaf: PyTree, sharding: NamedSharding) -> PyTree:
    if isinstance(leaf, jax.core.Tracer):
        return lax.with_sharding_constraint(leaf, sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct) or device_put.has_no_devices(sharding):
        return jax.ShapeDtypeStruct(
            leaf.shape,
            dtype_on_devices(leaf.dtype),
            sharding=sharding,
            weak_type=getattr(leaf, "weak_type", False),
        )
    if not isinstance(leaf, jax.Array):
        device_put.warn_of_wide_integers([leaf])
        # Copied, since JAX may use NumPy's memory for the array.
        leaf = np.array(leaf, dtype_on_devices(leaf.dtype))
        return device_put.laid_out(leaf, sharding)
    return device_put.unaliased(leaf, sharding)


def _agree_on_values(
    flat: Sequence[tuple[KeyPath, PyTree]], group: ReplicaGroup, caller: str
) -> None:
    """Compare arrays between workers; their values, if each worker has them whole."""
    workers = group.strategy.workers
    concrete = [
        (path_of(keys), leaf)
        for keys, leaf in flat
        if is_placeable(leaf)
        and not isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct)
    ]
    if workers.count == 1 or not concrete:
        return
    wholes = [(path, x) for path, x in concrete if not device_put.is_spread(x)]
    checksums = leaf_checksums([x for _, x in wholes])
    workers.agree(
        {
            "the arrays": [f"{path} {x.dtype}{list(x.shape)}" for path, x in concrete],
            "the values (their checksums)": [
                f"{path} {kind} {checksum:08x}"
                for (path, _), (_, kind, checksum) in zip(
                    wholes, checksums, strict=True
                )
            ],
        },
        f"the arguments of {caller}",
    )


def must_exchange_rows(batch: PyTree) -> bool:
    """Whether the devices have to exchange rows to join a batch."""
    leaves = jax.tree.leaves(batch, is_leaf=is_per_replica)
    return any(isinstance(x, PerReplica) and x.num_active is not None for x in leaves)


def global_batch(batch: PyTree, group: ReplicaGroup) -> PyTree:
    """Join the rows `[R, b, ...]` of each `PerReplica` in a pytree to `[B, ...]`."""
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_per_replica)
    values = [x for x in leaves if isinstance(x, PerReplica)]
    if not values:
        raise TypeError(
            f"Strategy.global_batch: got a {type(batch).__name__} without PerReplica. "
            "Pass a batch of strategy.experimental_distribute_dataset."
        )
    shardings = tuple(_sharding_of_rows(x, group) for x in values)
    num_active = tuple(x.num_active for x in values)
    arrays = [x.array for x in values]
    if device_put.has_no_devices(group.mirrored):
        shapes = jax.eval_shape(functools.partial(_joined, num_active), arrays)
        rows = [_placed(x, s) for x, s in zip(shapes, shardings, strict=True)]
    else:
        rows = _joiner(num_active, shardings)(arrays)
    rest = iter(rows)
    return structure.unflatten(next(rest) if is_per_replica(x) else x for x in leaves)


def _sharding_of_rows(value: PerReplica, group: ReplicaGroup) -> NamedSharding:
    """Split over the replicas' devices; whole on each if they do not divide the rows.

    Raises:
        TypeError: For a sparse array.
        ValueError: For values without rows, or of another number of replicas.
    """
    caller = "Strategy.global_batch"
    require_dense(value.array, caller)
    require_all_replicas(value, group.num_replicas, "global_batch")
    if value.array.ndim < 2:
        raise ValueError(
            f"{caller}: {value!r} has one scalar for each replica, and no rows. Use "
            "strategy.gather, or return values of rank 1 or more."
        )
    num_rows = (value.num_active or group.num_replicas) * value.array.shape[1]
    if num_rows % group.axis.size == 0:
        return group.per_replica
    _warn_of_whole_rows(num_rows, group.axis.size)
    return group.mirrored


@functools.cache
def _warn_of_whole_rows(num_rows: int, num_devices: int) -> None:
    _logger.warning(
        "Strategy.global_batch: %d devices do not divide a batch of %d rows, so each "
        "device has all of them. To divide them, make the distributed dataset with "
        "remainder='pad' and use its mask, or with remainder='drop'.",
        num_devices,
        num_rows,
    )


def _joined(
    num_active: Sequence[int | None], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    return [
        x[:number].reshape(-1, *x.shape[2:])
        for x, number in zip(arrays, num_active, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _joiner(
    num_active: tuple[int | None, ...], shardings: tuple[NamedSharding, ...]
) -> Wrapped:
    return jax.jit(
        functools.partial(_joined, num_active), out_shardings=list(shardings)
    )
