"""Fingerprints of arrays that should be equal on all replicas."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

__all__ = ["local", "per_replica"]


def per_replica(arrays: Sequence[Any], mesh: Mesh, axis_name: str) -> np.ndarray:
    """A checksum of every replica's copy of every array.

    Args:
        arrays: Arrays that are replicated over `mesh`.
        mesh: The replicas' devices.
        axis_name: Its axis.

    Returns:
        `uint32[R, len(arrays)]`. Copies that differ in one bit have other checksums;
        several changes may cancel with a chance of 2**-32. Zeros where there is one
        copy only.
    """
    num_copies = mesh.shape[axis_name]
    if not arrays or num_copies == 1:
        return np.zeros((num_copies, len(arrays)), np.uint32)
    return np.asarray(_program(mesh, axis_name)(list(arrays)))


@functools.lru_cache(maxsize=16)
def _program(mesh: Mesh, axis_name: str) -> Any:
    def row(arrays: list[jax.Array]) -> jax.Array:
        checksums = jnp.stack([_checksum(x) for x in arrays])
        # To all replicas: another process' row could not be read here.
        return jax.lax.all_gather(checksums, axis_name)

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


def local(arrays: Sequence[Any]) -> list[int]:
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
