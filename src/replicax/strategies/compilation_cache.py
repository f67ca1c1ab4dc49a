"""Turns on JAX's compilation cache on disk, unless the user has configured it."""

import functools
import logging
import os
import warnings
from pathlib import Path

import jax

from replicax._util.environment import usable_cores
from replicax._util.files import caches_folder

__all__ = ["turn_on"]

_SWITCH = "REPLICAX_COMPILATION_CACHE"
# Programs for some of a TPU's chips, without the first, crash libtpu on loading
# (github.com/jax-ml/jax/issues/38004).
_SAFE_PLATFORMS = ("cpu", "gpu", "cuda", "rocm")
_XLA_CACHES = "jax_persistent_cache_enable_xla_caches"
_XLA_CACHES_OF_JAX = "xla_gpu_per_fusion_autotune_cache_dir"
_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_LEAST_SECONDS_OF_JAX = 1.0
_MAX_BYTES = 2 * 2**30
_UNWRITABLE = "Error writing persistent .* Multiple temp buffer allocations"

_log = logging.getLogger("replicax")


@functools.cache
def turn_on(platform: str) -> Path | None:
    """Let JAX store programs on disk that take 0.1 s or longer to compile.

    Nothing changes if the user has configured JAX's cache, or in a job of several
    processes. Call it after JAX has started its devices, before the first compilation.
    Returns the folder; None if JAX's cache stays as it is.
    """
    folder_name = os.environ.get(_SWITCH, "").strip()
    if folder_name.lower() in ("off", "0", "false") or _is_settled_by_user():
        return None
    if folder_name.lower() in ("on", "1", "true"):
        folder_name = ""
    if not folder_name and platform not in _SAFE_PLATFORMS:
        return None
    # With GPUs, processes share the tuning of a program: a process that loads it from
    # disk leaves the others waiting for its share. With CPUs only process 0 writes.
    if jax.process_count() > 1:
        return None
    try:
        base = Path(folder_name).expanduser().absolute()
        if not folder_name:
            base = caches_folder(os.environ) / "compiled"
        folder = base / _threads_folder()
        # This process runs stored programs unchecked: no other user may write here.
        for path in (base, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _trim(base, _MAX_BYTES)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder.
        _log.warning(
            "Compiled programs are not kept for later runs: %s. Name another folder in "
            "%s, or set it to 'off'.",
            error,
            _SWITCH,
        )
        return None
    # XLA's own files would grow without bound. A failed write of one fails the
    # compilation, while JAX only warns of a failed write.
    _replace_default(_XLA_CACHES, _XLA_CACHES_OF_JAX, "")
    # A start compiles dozens of small programs, for 10 s in all. Loading one from the
    # cache takes 10 ms.
    _replace_default(_LEAST_SECONDS, _LEAST_SECONDS_OF_JAX, 0.1)
    # XLA cannot write some large programs for CPUs. JAX warns about each, and compiles
    # it in each run, as it does without a cache.
    warnings.filterwarnings("ignore", _UNWRITABLE, UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def _replace_default(option: str, default: object, value: object) -> None:
    """Set an option of JAX, unless the user has set it."""
    if option.upper() not in os.environ and jax.config.values[option] == default:
        jax.config.update(option, value)


def _is_settled_by_user() -> bool:
    """Whether the user turned JAX's cache on or off, by a call or a variable."""
    return (
        "JAX_ENABLE_COMPILATION_CACHE" in os.environ
        or "JAX_COMPILATION_CACHE_DIR" in os.environ
        or jax.config.values["jax_compilation_cache_dir"] is not None
        or not jax.config.values["jax_enable_compilation_cache"]
    )


def _threads_folder() -> str:
    """Name the folder of programs for this number of threads.

    XLA divides a CPU program's loops by the number of threads, which JAX's cache key
    does not include: on 64 cores JAX would load a program that was compiled for one.
    """
    cores, pool = usable_cores(), os.environ.get("NPROC", "")
    return f"threads-{cores}-{pool}" if pool.isdecimal() else f"threads-{cores}"


def _trim(base: Path, max_bytes: int) -> None:
    """Delete the least recently used programs, until `max_bytes` are left.

    JAX's own eviction needs a package that JAX does not depend on, and locks the folder
    during each compilation.
    """
    programs = []
    for path in base.glob("threads-*/*-cache"):
        try:
            status = path.stat()
        except FileNotFoundError:  # Another process is deleting, too.
            continue
        programs.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    excess = sum(size for _, size, _ in programs) - max_bytes
    for _, size, path in sorted(programs):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size
