"""XLA's compiler options for steps."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from replicax.cpu import settings
from replicax.engine.overlap.buckets import bytes_of_bucket

__all__ = ["compiler_options"]

# What XLA merges of a divided update. By its own defaults a small model's gradients are
# one sum after the backward pass, and its weights one gather before the forward pass.
# All-reduces are packed by `buckets` instead.
_REDUCE_SCATTER = "xla_gpu_reduce_scatter_combine_threshold_bytes"
_ALL_GATHER = "xla_gpu_all_gather_combine_threshold_bytes"
_PLATFORMS = ("gpu", "cuda", "rocm")

_log = logging.getLogger("replicax")


def compiler_options(
    platform: str,
    environ: Mapping[str, str],
    *,
    scattered_bytes: int = 0,
    num_devices: int = 1,
    spans_hosts: bool = False,
    largest_bytes: int = 0,
) -> dict[str, Any] | None:
    """The `compiler_options` of `jax.jit` for a step on devices of `platform`.

    What the user set in `XLA_FLAGS` is left out, and so is what this version of XLA
    does not know (logged once). None where there are no options, as for TPUs, or for
    GPUs where no sum is scattered.

    Args:
        platform: Of the devices, as JAX says it, such as `"gpu"`, `"cuda"` or `"tpu"`.
        environ: The process' environment.
        scattered_bytes: Size of all gradients whose sums are scattered.
        num_devices: Number of devices that they are scattered over.
        spans_hosts: Whether these are on several hosts.
        largest_bytes: Size of the largest intermediate array, where it is known.

    Raises:
        OSError: If `XLA_FLAGS` names a file of flags that cannot be read.
    """
    if platform == "cpu":
        return settings.compiler_options(environ, largest_bytes=largest_bytes)
    if platform not in _PLATFORMS or not scattered_bytes:
        return None
    own = settings.flags_in(environ)
    size = bytes_of_bucket(scattered_bytes, spans_hosts=spans_hosts)
    wanted = {
        # A bucket at once: buckets wait for each other. XLA counts what a device gets.
        _REDUCE_SCATTER: scattered_bytes // num_devices,
        # Weights travel in half precision, and nothing hides the first gather. A
        # little more than a quarter takes a kernel's bias along.
        _ALL_GATHER: size * 9 // 32,
    }
    options = {
        name: value
        for name, value in wanted.items()
        if name not in own and _is_known(name, value)
    }
    return options or None


@functools.cache
def _is_known(name: str, value: int) -> bool:
    """Whether this XLA accepts an option: a tiny program is compiled with it."""
    probe = jax.jit(lambda x: x, compiler_options={name: value})
    try:
        probe.lower(jax.ShapeDtypeStruct((), jnp.int32)).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        _log.warning(
            "This version of XLA has no option %s; steps are compiled without it.", name
        )
        return False
    return True
