"""Checks that replicas and workers have equal variables and random states."""

import functools
import json
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Wrapped
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util import random_state
from replicax.cluster.workers import Workers
from replicax.engine.composites import is_key
from replicax.engine.device_put import laid_out
from replicax.engine.group import ReplicaGroup
from replicax.engine.labels import Labels
from replicax.engine.variables import Variable
from replicax.errors import ClusterMismatchError, DivergenceError

__all__ = [
    "checksums_of_replicas",
    "described_value",
    "local_checksums",
    "require_equal",
    "require_equal_arguments",
    "synchronize_random_state",
    "variables_of_all_workers",
]

_MOST_SHOWN = 8  # Messages show the values of arguments of up to 8 elements.


def checksums_of_replicas(
    arrays: Sequence[jax.Array], mesh: Mesh, axis_name: str
) -> np.ndarray:
    """A checksum of every copy of replicated arrays: `uint32[R, len(arrays)]`.

    A difference of one bit always changes a checksum; other differences are missed with
    a probability of 2**-32.
    """
    num_copies = mesh.shape[axis_name]
    if not arrays or num_copies == 1:
        return np.zeros((num_copies, len(arrays)), np.uint32)
    return np.asarray(_checksums_of_mesh(mesh, axis_name)(list(arrays)))


@functools.lru_cache(maxsize=16)
def _checksums_of_mesh(mesh: Mesh, axis_name: str) -> Wrapped:
    def row(arrays: list[jax.Array]) -> jax.Array:
        # Gather, since a process cannot read other processes' rows.
        return jax.lax.all_gather(_checksums(arrays), axis_name)

    return jax.jit(
        jax.shard_map(
            row,
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
    if is_key(array):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    word = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    data = jax.lax.bitcast_convert_type(array, word).ravel().astype(jnp.uint32)
    # Mix in the position, so that swapped values change the sum. MurmurHash's finalizer
    # prevents changes at evenly spaced positions from cancelling.
    x = data ^ (jnp.arange(data.size, dtype=jnp.uint32) * jnp.uint32(2654435761))
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)


def variables_of_all_workers(labels: Labels, workers: Workers) -> list[Variable]:
    """The variables that exist on every worker, in the same order on all.

    Python may have freed a model on some workers only.
    """
    variables = {json.dumps(k): v for k, v in labels if internals.has_value(v)}
    own = {label: internals.described(v) for label, v in variables.items()}
    of_all = workers.exchange("variables", own)
    return [
        variables[label]
        for label in sorted(variables)
        if all(other.get(label) == own[label] for other in of_all)
    ]


def require_equal(
    group: ReplicaGroup, variables: Sequence[Variable], values: Sequence[jax.Array]
) -> None:
    """Compare the replicas' copies of variables bit by bit; skip sharded variables.

    Raises:
        DivergenceError: The message names the variables and replicas that differ.
    """
    pairs = zip(variables, values, strict=True)
    _require_equal(
        group,
        [(repr(v.path), x) for v, x in pairs if group.layouts.dim_of(v) is None],
    )


def require_equal_arguments(
    group: ReplicaGroup, arguments: Mapping[str, ArrayLike]
) -> None:
    """Compare the replicas' copies of a call's arguments; see `require_equal`.

    Skips arguments whose copies a single process makes, so that they are equal.
    """
    placed = {
        name: x
        if isinstance(x, jax.Array)
        else laid_out(np.asarray(jnp.asarray(x)), group.mirrored)
        for name, x in arguments.items()
        if group.holds(x) or group.spans_processes
    }
    _require_equal(group, [*placed.items()])


def _require_equal(group: ReplicaGroup, pairs: Sequence[tuple[str, jax.Array]]) -> None:
    sums = checksums_of_replicas([x for _, x in pairs], group.mesh, group.axis.name)
    differing = np.flatnonzero((sums != sums[:1]).any(axis=0))
    if not differing.size:
        return
    places = "; ".join(
        f"{pairs[i][0]} on {_differing_replicas(group, sums[:, i])}"
        for i in differing.tolist()
    )
    raise DivergenceError(
        f"Strategy.check_replicas: copies differ from replica 0's: {places}. The "
        "replicas have drifted apart; restart from a checkpoint, and look for "
        "host callbacks or random numbers outside Keras' SeedGenerator in the step, "
        "and for arguments that each worker computes by itself."
    )


def described_value(value: ArrayLike) -> str:
    """The dtype, shape and values of an argument; of a large one, its checksum."""
    if isinstance(value, jax.Array):
        array = value.addressable_shards[0].data
    else:
        array = jnp.asarray(value)  # In the dtype in which the program gets it.
    kind = f"{array.dtype}{list(array.shape)}"
    if array.size > _MOST_SHOWN or is_key(array):
        return f"{kind} with checksum {int(_checksums([array])[0]):08x}"
    return f"{kind} {np.asarray(array).tolist()}"


def _differing_replicas(group: ReplicaGroup, checksums: np.ndarray) -> str:
    devices = np.flatnonzero(checksums != checksums[0])
    num = group.num_per_device
    replicas = [d * num + i for d in devices.tolist() for i in range(num)]
    return f"replicas {replicas}"


def synchronize_random_state(workers: Workers, call: str = "") -> None:
    """Make Python's, NumPy's and Keras' random states the same on all workers.

    Initial weights and shuffled orders depend on these states. States that are equal,
    such as after `keras.utils.set_random_seed`, are not changed.

    Raises:
        ClusterMismatchError: If workers differ in `call`, the call that they will make.
    """
    if workers.count == 1:
        return
    of_all = workers.exchange(
        "random state", [call, random_state.fingerprint()], what=call or None
    )
    first = of_all[0][0]
    for name, (other, _) in zip(workers.names, of_all, strict=True):
        if other != first:
            raise ClusterMismatchError(
                f"{workers.names[0]} calls {first or 'nothing'}, while {name} "
                f"calls {other or 'nothing'}. All workers must make the same calls of "
                "a model in the same order."
            )
    states = [state for _, state in of_all]
    if any(state != states[0] for state in states):
        # All use worker 0's state: a script that seeds it is reproducible.
        keras.utils.set_random_seed(int(states[0][:7], 16))
