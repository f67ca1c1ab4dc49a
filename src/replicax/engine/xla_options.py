"""What XLA is told when a step is compiled.

On GPUs, so that sums overlap with computation; on CPUs, so that it takes less time and
steps find their memory where the last one left it.
"""

import functools
import logging
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from replicax.engine.divergence import inner_jaxprs, open_jaxpr

__all__ = [
    "HEAP_BYTES",
    "compiler_options",
    "keep_loops",
    "largest_array",
    "without_kept_loops",
]

Option = bool | int

# Large enough to fill NVLink or a fast network, small enough that the first sums travel
# while the backward pass still computes.
_PACK_BYTES = 32 * 2**20

_GPU: Mapping[str, Option] = {
    # Starts a collective as early, and waits for it as late, as the program allows.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Said, or XLA may merge by free memory: into one sum after the backward pass.
    "xla_gpu_all_reduce_combine_threshold_bytes": _PACK_BYTES,
    # The two halves of a sharded update, likewise.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": _PACK_BYTES,
    "xla_gpu_all_gather_combine_threshold_bytes": _PACK_BYTES,
}
_PLATFORMS = ("gpu", "cuda", "rocm")

HEAP_BYTES = 48 * 2**20
"""Most that a step on a CPU takes from malloc at once, where its arrays are smaller.

XLA asks for all intermediate arrays of a step together. glibc serves JAX' threads from
heaps of 64 MiB each, which it keeps; what does not fit into one comes from the kernel
and goes back to it, page by page, in every step. In pieces that fit, the transformer of
the bench takes 701 ms a step on two devices and not 1093, and MobileNetV2 187
and not 276; pieces of 2 to 16 MiB gain less.
"""

# Every XLA that JAX 0.10 to 0.12 come with knows it. To ask would cost 20 ms.
_HEAP = "xla_multiheap_size_constraint_per_heap"

# No option of a program: XLA takes these from its flags only. Unrolled loops take time
# to compile (on one core the first step of ResNet-18 in the bench 8.6 s and not
# 7.8, of MobileNetV2 41 and not 32), and steps take as long with and without.
_EXTRA = "--xla_backend_extra_options"
_KEEP_LOOPS = f"{_EXTRA}=xla_cpu_disable_loop_unrolling"

_log = logging.getLogger("replicax")


def keep_loops(environ: MutableMapping[str, str]) -> None:
    """Tell XLA in `XLA_FLAGS` not to unroll loops of programs for CPUs.

    Done on import: XLA reads it once, when the first devices are asked for. Where
    `XLA_FLAGS` has extra options of the user, or is a file, nothing is added.

    Args:
        environ: The process' environment, which is changed.

    Example:
        >>> environ = {"XLA_FLAGS": "--xla_dump_to=folder"}
        >>> keep_loops(environ)
        >>> environ["XLA_FLAGS"].split()[1]
        '--xla_backend_extra_options=xla_cpu_disable_loop_unrolling'
    """
    flags = environ.get("XLA_FLAGS", "").strip()
    if _EXTRA not in flags and (not flags or flags.startswith("-")):
        environ["XLA_FLAGS"] = f"{flags} {_KEEP_LOOPS}".strip()


def without_kept_loops(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what `keep_loops` has added, for other programs."""
    flags = environ.get("XLA_FLAGS", "")
    rest = flags.removesuffix(_KEEP_LOOPS).strip()
    others = {k: v for k, v in environ.items() if k != "XLA_FLAGS"}
    return others | ({"XLA_FLAGS": rest} if rest else {})


def compiler_options(
    platform: str,
    environ: Mapping[str, str],
    *,
    bytes_per_pack: int = 0,
    largest_bytes: int = 0,
) -> dict[str, Option] | None:
    """The `compiler_options` of `jax.jit` for a step on devices of `platform`.

    What the user set in `XLA_FLAGS` is left out, and so is what this version of XLA
    does not know (logged once).

    Args:
        platform: Of the devices, as JAX says it, such as `"gpu"`, `"cuda"` or `"tpu"`.
        environ: The process' environment.
        bytes_per_pack: Size of the packs that gradients are summed in; 0: not packed.
        largest_bytes: Size of the largest intermediate array, where it is known. On
            CPUs XLA would warn of each that is larger than `HEAP_BYTES`.

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
    own = _flags(environ.get("XLA_FLAGS", ""))
    if platform == "cpu" and largest_bytes <= HEAP_BYTES and _HEAP not in own:
        return {_HEAP: HEAP_BYTES}
    if platform not in _PLATFORMS:
        return None
    wanted = dict(_GPU)
    if bytes_per_pack:
        wanted["xla_gpu_all_reduce_combine_threshold_bytes"] = bytes_per_pack
    options = {
        name: value
        for name, value in wanted.items()
        if name not in own and _is_known(name, value)
    }
    return options or None


def largest_array(jaxpr: Any) -> int:
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


def _bytes_of(var: Any) -> int:
    aval = var.aval
    if not hasattr(aval, "size"):  # A token.
        return 0
    itemsize = getattr(aval.dtype, "itemsize", 0)  # Keys of random numbers have none.
    if jnp.issubdtype(aval.dtype, jnp.floating):
        itemsize = max(itemsize, 4)
    return aval.size * itemsize


def _flags(text: str) -> set[str]:
    """Names of the flags in `XLA_FLAGS`, which may also be the name of a file."""
    text = text.strip()
    if text and not text.startswith("-"):
        text = Path(text).read_text(encoding="utf-8")
    return {word.lstrip("-").split("=", 1)[0] for word in text.split()}


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
