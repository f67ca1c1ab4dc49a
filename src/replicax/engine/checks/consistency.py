"""Checks that replicas and workers have equal variables and random states."""

import functools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Wrapped

from replicax._private import keras as internals
from replicax._util import random_state
from replicax.cluster.workers import Workers
from replicax.engine.empty_arrays import creating_empty_arrays
from replicax.engine.group import ReplicaGroup
from replicax.engine.labels import Labels
from replicax.engine.variables import Variable
from replicax.errors import ClusterMismatchError, DivergenceError

__all__ = [
    "checksums_of_replicas",
    "local_checksums",
    "require_equal",
    "synchronize_random_state",
    "variables_of_all_workers",
]


def checksums_of_replicas(
    arrays: Sequence[jax.Array], mesh: Mesh, axis_name: str
) -> np.ndarray:
    """A checksum of every copy of arrays that are replicated over a mesh.

    `uint32[R, len(arrays)]`. Copies that differ in one bit have other checksums; more
    changes may cancel with a chance of 2**-32. Zeros where there is one copy only.
    """
    num_copies = mesh.shape[axis_name]
    if not arrays or num_copies == 1:
        return np.zeros((num_copies, len(arrays)), np.uint32)
    return np.asarray(_checksums_of_mesh(mesh, axis_name)(list(arrays)))


@functools.lru_cache(maxsize=16)
def _checksums_of_mesh(mesh: Mesh, axis_name: str) -> Wrapped:
    def row(arrays: list[jax.Array]) -> jax.Array:
        # To all replicas: another process' row could not be read here.
        return jax.lax.all_gather(_checksums(arrays), axis_name)

    return jax.jit(
        jax.shard_map(
            creating_empty_arrays(row),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names={axis_name},
            check_vma=False,
        )
    )


def local_checksums(arrays: Sequence[jax.Array]) -> list[int]:
    """A checksum of this process' first copy of every array, without communication."""
    copies = [x.addressable_data(0) for x in arrays]
    return np.asarray(_checksums(copies)).tolist() if copies else []


@jax.jit
def _checksums(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([_checksum(x) for x in arrays])


def _checksum(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    word = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    data = jax.lax.bitcast_convert_type(array, word).ravel().astype(jnp.uint32)
    # The place goes in, or swapped values would go unseen. All is mixed as MurmurHash
    # does in the end, or changes at evenly spaced places would cancel.
    x = data ^ (jnp.arange(data.size, dtype=jnp.uint32) * jnp.uint32(2654435761))
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)


def variables_of_all_workers(labels: Labels, workers: Workers) -> list[Variable]:
    """The labelled variables that every worker has a value of, in a common order.

    Python frees a model when it likes: another worker may have freed one already.
    """
    alive = {json.dumps(k): v for k, v in labels if internals.has_value(v)}
    mine = {label: internals.described(v) for label, v in alive.items()}
    of_all = workers.exchange("variables", mine)
    return [
        alive[label]
        for label in sorted(alive)
        if all(other.get(label) == mine[label] for other in of_all)
    ]


def require_equal(
    group: ReplicaGroup, variables: Sequence[Variable], values: Sequence[jax.Array]
) -> None:
    """Compare the devices' copies of variables, bit by bit.

    Variables of which each device holds a block have no copies and are left out. A
    DivergenceError names the variables that differ and where.
    """
    copied = [
        (v, x)
        for v, x in zip(variables, values, strict=True)
        if group.layouts.dim_of(v) is None
    ]
    prints = checksums_of_replicas([x for _, x in copied], group.mesh, group.axis.name)
    differing = np.flatnonzero((prints != prints[:1]).any(axis=0))
    if not differing.size:
        return
    found = "; ".join(
        f"{copied[i][0].path!r} on {_numbers(group, prints[:, i])}"
        for i in differing.tolist()
    )
    raise DivergenceError(
        f"Strategy.check_replicas: copies differ from replica 0's: {found}. The "
        "replicas have drifted apart; restart from a checkpoint, and look for "
        "host callbacks or random numbers outside Keras' SeedGenerator in the step."
    )


def _numbers(group: ReplicaGroup, prints: np.ndarray) -> str:
    devices = np.flatnonzero(prints != prints[0])
    each = group.num_per_device
    replicas = [d * each + i for d in devices.tolist() for i in range(each)]
    return f"replicas {replicas}"


def synchronize_random_state(workers: Workers, call: str = "") -> None:
    """Make Python's, NumPy's and Keras' random numbers the same on all workers.

    Initial weights and shuffled orders depend on them. If the states are the same
    already, as after `keras.utils.set_random_seed` with one seed, they stay. `call`
    says what this worker is about to do: other words than others' get a
    ClusterMismatchError.
    """
    if workers.count == 1:
        return
    told = workers.exchange(
        "random state", [call, random_state.fingerprint()], what=call or None
    )
    for name, (other, _) in zip(workers.names, told, strict=True):
        if other != told[0][0]:
            raise ClusterMismatchError(
                f"{workers.names[0]} calls {told[0][0] or 'nothing'}, while {name} "
                f"calls {other or 'nothing'}. All workers must make the same calls of "
                "a model in the same order."
            )
    states = [state for _, state in told]
    if any(state != states[0] for state in states):
        # Worker 0's state decides: a run that seeds it can be repeated.
        keras.utils.set_random_seed(int(states[0][:7], 16))
