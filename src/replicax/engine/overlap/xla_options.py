"""XLA's compiler options for steps."""

from collections.abc import Mapping
from typing import Any

from replicax.cpu import settings
from replicax.engine.overlap.buckets import bytes_of_bucket

__all__ = ["compiler_options"]

# How much XLA merges into one collective, if replicas divide the updates. By default it
# may merge all of a small model's gradients, and all gathers of weights.
_REDUCE_SCATTER = "xla_gpu_reduce_scatter_combine_threshold_bytes"
_ALL_GATHER = "xla_gpu_all_gather_combine_threshold_bytes"
_PLATFORMS = ("gpu", "cuda", "rocm")

# On CPUs, this pass of XLA aborts the process ("Invalid binary instruction opcode
# copy") at sums of 16-bit floats over one mesh axis, if XLA's partitioner divides the
# program along another. Without the pass, CPUs sum in 16 bits, like GPUs.
_DISABLED = "xla_disable_hlo_passes"
_PROMOTION = "all-reduce-promotion"


def compiler_options(
    platform: str,
    environ: Mapping[str, str],
    *,
    scattered_bytes: int = 0,
    num_devices: int = 1,
    spans_hosts: bool = False,
    largest_bytes: int = 0,
    is_partitioned: bool = False,
) -> dict[str, Any] | None:
    """The `compiler_options` of `jax.jit` for a step on devices of `platform`.

    Options that the user set in `XLA_FLAGS` are left out. None if no options are left,
    as on TPUs, or on GPUs if no sum is scattered.

    Args:
        platform: JAX's name of the platform, such as `"gpu"`, `"cuda"` or `"tpu"`.
        environ: The process' environment.
        scattered_bytes: Size of all gradients whose sums are scattered.
        num_devices: Number of devices over which the sums are scattered.
        spans_hosts: Whether the devices are on several hosts.
        largest_bytes: Size of the largest intermediate array, if known.
        is_partitioned: Whether XLA divides the program along further mesh axes.

    Raises:
        OSError: If `XLA_FLAGS` names a file of flags that cannot be read.
    """
    if platform == "cpu":
        options = settings.compiler_options(environ, largest_bytes=largest_bytes)
        if is_partitioned:
            passes = settings.flags_in(environ).get(_DISABLED, "").split(",")
            options[_DISABLED] = ",".join([*filter(None, passes), _PROMOTION])
        return options
    if platform not in _PLATFORMS or not scattered_bytes:
        return None
    own = settings.flags_in(environ)
    size = bytes_of_bucket(scattered_bytes, spans_hosts=spans_hosts)
    wanted = {
        # All gradients of a bucket; XLA cannot merge buckets, which depend on each
        # other. The option counts the bytes of one device's blocks.
        _REDUCE_SCATTER: scattered_bytes // num_devices,
        # A quarter of a bucket: weights are gathered in half precision, and nothing
        # hides the first gather. An eighth more for the biases.
        _ALL_GATHER: size * 9 // 32,
    }
    options = {name: value for name, value in wanted.items() if name not in own}
    return options or None
