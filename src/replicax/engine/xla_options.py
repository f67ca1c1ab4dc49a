"""XLA's compiler options for steps: on GPUs all-reduces overlap with computation."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from replicax.cpu import settings
from replicax.engine.divergence import inner_jaxprs, open_jaxpr

__all__ = [
    "compiler_options",
    "largest_array",
]

Option = bool | int

# Large enough to fill NVLink or a fast network, small enough that the first sums travel
# while the backward pass still computes.
_PACK_BYTES = 32 * 2**20

_REDUCE_SCATTER = "xla_gpu_reduce_scatter_combine_threshold_bytes"

_GPU: Mapping[str, Option] = {
    # Starts a collective as early, and waits for it as late, as the program allows.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Said, or XLA may merge by free memory: into one sum after the backward pass.
    "xla_gpu_all_reduce_combine_threshold_bytes": _PACK_BYTES,
    # The two halves of a sharded update, likewise.
    _REDUCE_SCATTER: _PACK_BYTES,
    "xla_gpu_all_gather_combine_threshold_bytes": _PACK_BYTES,
}
_PLATFORMS = ("gpu", "cuda", "rocm")

_log = logging.getLogger("replicax")


def compiler_options(
    platform: str,
    environ: Mapping[str, str],
    *,
    bytes_per_pack: int = 0,
    num_devices: int = 1,
    largest_bytes: int = 0,
) -> dict[str, Any] | None:
    """The `compiler_options` of `jax.jit` for a step on devices of `platform`.

    What the user set in `XLA_FLAGS` is left out, and so is what this version of XLA
    does not know (logged once).

    Args:
        platform: Of the devices, as JAX says it, such as `"gpu"`, `"cuda"` or `"tpu"`.
        environ: The process' environment.
        bytes_per_pack: Size of the packs that gradients are summed in; 0: not packed.
        num_devices: Number of devices that sums are scattered over.
        largest_bytes: Size of the largest intermediate array, where it is known.

    Returns:
        Options by name; None where there are none, as for TPUs.

    Raises:
        OSError: If `XLA_FLAGS` names a file of flags that cannot be read.

    Example:
        >>> options = compiler_options("gpu", {}, bytes_per_pack=1_000_000)
        >>> options["xla_gpu_all_reduce_combine_threshold_bytes"]
        1000000
        >>> compiler_options("tpu", {}) is None
        True
    """
    if platform == "cpu":
        return settings.compiler_options(environ, largest_bytes=largest_bytes)
    if platform not in _PLATFORMS:
        return None
    own = settings.flags_in(environ)
    wanted = dict(_GPU)
    if bytes_per_pack:
        wanted["xla_gpu_all_reduce_combine_threshold_bytes"] = bytes_per_pack
    if _REDUCE_SCATTER in wanted:
        # XLA counts what a device gets: a part of what is summed, and kept until then.
        wanted[_REDUCE_SCATTER] //= num_devices
    options = {
        name: value
        for name, value in wanted.items()
        if name not in own and _is_known(name, value)
    }
    return options or None


def largest_array(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Bytes of the largest array that a jaxpr's equations make.

    Floating-point numbers count as 32 bits at least, as which XLA computes on CPUs.

    Example:
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.exp(x).sum())(jnp.zeros(8, "bfloat16"))
        >>> largest_array(jaxpr)
        32
    """
    largest = 0
    for eqn in open_jaxpr(jaxpr).eqns:
        inner = inner_jaxprs(eqn)
        found = map(largest_array, inner) if inner else map(_bytes_of, eqn.outvars)
        largest = max(largest, *found, 0)
    return largest


def _bytes_of(var: Var) -> int:
    size, dtype = getattr(var.aval, "size", None), getattr(var.aval, "dtype", None)
    if size is None or dtype is None:  # A token.
        return 0
    itemsize = getattr(dtype, "itemsize", 0)  # Keys of random numbers have none.
    if jnp.issubdtype(dtype, jnp.floating):
        itemsize = max(itemsize, 4)
    return size * itemsize


@functools.cache
def _is_known(name: str, value: Option) -> bool:
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
