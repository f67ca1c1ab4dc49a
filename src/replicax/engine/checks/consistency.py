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
    """A checksum of every copy of replicated arrays: `uint32[R, len(arrays)]`.

    Checksums of copies that differ in one bit always differ; of other copies they are
    equal with a chance of 2**-32. With one copy all are zero.
    """
    num_copies = mesh.shape[axis_name]
    if not arrays or num_copies == 1:
        return np.zeros((num_copies, len(arrays)), np.uint32)
    return np.asarray(_checksums_of_mesh(mesh, axis_name)(list(arrays)))


@functools.lru_cache(maxsize=16)
def _checksums_of_mesh(mesh: Mesh, axis_name: str) -> Wrapped:
    def row(arrays: list[jax.Array]) -> jax.Array:
        # Gathered, since this process cannot read another process' row.
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
    """A checksum of this process' first shard of every array, without communication."""
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
    # With the position, so that swapped values change the sum. MurmurHash's final
    # mixing keeps changes at evenly spaced positions from cancelling.
    x = data ^ (jnp.arange(data.size, dtype=jnp.uint32) * jnp.uint32(2654435761))
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)


def variables_of_all_workers(labels: Labels, workers: Workers) -> list[Variable]:
    """The labelled variables that have a value on every worker, in a common order.

    Python's garbage collector may have freed a model on some workers only.
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
    """Compare the devices' copies of variables, bit by bit; skip sharded variables.

    A DivergenceError names the variables and replicas that differ.
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
    places = "; ".join(
        f"{copied[i][0].path!r} on {_numbers(group, prints[:, i])}"
        for i in differing.tolist()
    )
    raise DivergenceError(
        f"Strategy.check_replicas: copies differ from replica 0's: {places}. The "
        "replicas have drifted apart; restart from a checkpoint, and look for "
        "host callbacks or random numbers outside Keras' SeedGenerator in the step."
    )


def _numbers(group: ReplicaGroup, prints: np.ndarray) -> str:
    devices = np.flatnonzero(prints != prints[0])
    each = group.num_per_device
    replicas = [d * each + i for d in devices.tolist() for i in range(each)]
    return f"replicas {replicas}"


def synchronize_random_state(workers: Workers, call: str = "") -> None:
    """Make Python's, NumPy's and Keras' random states the same on all workers.

    Initial weights and shuffled orders depend on them. Equal states stay, as after
    `keras.utils.set_random_seed` with one seed. If workers differ in `call`, the call
    that a worker is about to make, a ClusterMismatchError says so.
    """
    if workers.count == 1:
        return
    answers = workers.exchange(
        "random state", [call, random_state.fingerprint()], what=call or None
    )
    first = answers[0][0]
    for name, (other, _) in zip(workers.names, answers, strict=True):
        if other != first:
            raise ClusterMismatchError(
                f"{workers.names[0]} calls {first or 'nothing'}, while {name} "
                f"calls {other or 'nothing'}. All workers must make the same calls of "
                "a model in the same order."
            )
    states = [state for _, state in answers]
    if any(state != states[0] for state in states):
        # Worker 0's state decides: a run that seeds it can be repeated.
        keras.utils.set_random_seed(int(states[0][:7], 16))
