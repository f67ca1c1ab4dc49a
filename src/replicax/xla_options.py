"""What XLA is told when a step is compiled.

On GPUs, so that sums overlap with computation; on CPUs, so that it takes less time.
"""

import functools
import logging
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import jax
import jax.numpy as jnp

__all__ = ["compiler_options", "keep_loops", "without_kept_loops"]

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

# No option of a program: XLA takes these from its flags only. Unrolled loops take time
# to compile (on one core the first step of ResNet-18 in `replicax bench` 8.6 s and not
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
    platform: str, environ: Mapping[str, str], *, bytes_per_pack: int = 0
) -> dict[str, Option] | None:
    """The `compiler_options` of `jax.jit` for a step on devices of `platform`.

    What the user set in `XLA_FLAGS` is left out, and so is what this version of XLA
    does not know (logged once).

    Args:
        platform: Of the devices, as JAX says it, such as `"gpu"`, `"cuda"` or `"tpu"`.
        environ: The process' environment.
        bytes_per_pack: Size of the packs that gradients are summed in; 0: not packed.

    Returns:
        Options by name; None where there are none: only GPUs have some.

    Raises:
        OSError: If `XLA_FLAGS` names a file of flags that cannot be read.

    Example:
        >>> options = compiler_options("gpu", {}, bytes_per_pack=1_000_000)
        >>> options["xla_gpu_all_reduce_combine_threshold_bytes"]
        1000000
        >>> compiler_options("cpu", {}) is None
        True
    """
    if platform not in _PLATFORMS:
        return None
    wanted = dict(_GPU)
    if bytes_per_pack:
        wanted["xla_gpu_all_reduce_combine_threshold_bytes"] = bytes_per_pack
    own = _flags(environ.get("XLA_FLAGS", ""))
    options = {
        name: value
        for name, value in wanted.items()
        if name not in own and _is_known(name, value)
    }
    return options or None


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
