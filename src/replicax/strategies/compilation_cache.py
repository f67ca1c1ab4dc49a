"""Turns on JAX' compilation cache on disk, where it is safe and not set by the user."""

import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax

from replicax._private.jax import jaxlib_version
from replicax._util.environment import is_off, usable_cores
from replicax._util.files import caches_folder

__all__ = ["turn_on"]

_SWITCH = "REPLICAX_COMPILATION_CACHE"
_JAX_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
_XLA_CACHES_OF_JAX = "xla_gpu_per_fusion_autotune_cache_dir"
_MAX_BYTES = 2 * 2**30
_UNWRITABLE = "Error writing persistent .* Multiple temp buffer allocations"

# Before, XLA logs errors that speak of SIGILL for each program that it loads on a CPU
# with AVX-512, though the program was compiled on this very machine.
_QUIET_ON_CPUS = (0, 10, 2)

_log = logging.getLogger("replicax")


@functools.cache
def turn_on(platform: str) -> Path | None:
    """Let JAX keep programs that took long to compile in a folder of the user.

    A later call for the same platform changes nothing, and neither does the first if
    the user told JAX about its cache, or in a job of several processes. To be called
    when JAX has started its devices, before anything is compiled; it compiles nothing.
    Returns the folder; None if this left JAX's cache as it is.
    """
    asked = os.environ.get(_SWITCH, "").strip()
    if asked.lower() in ("on", "1", "true"):
        asked = ""  # As without the switch, not a folder of that name.
    if is_off(_SWITCH) or _is_settled_by_user():
        return None
    if not asked and not _is_safe(platform):
        return None
    # With GPUs, processes share the work of tuning a program: one that finds it on disk
    # leaves the others waiting for its part. With CPUs only process 0 would find any.
    if jax.process_count() > 1:
        return None
    try:
        base = (
            Path(asked).expanduser().absolute()
            if asked
            else _default_folder(os.environ)
        )
        folder = base / _threads(os.environ)
        _make_writable(base)
        _make_writable(folder)
        _trim(base, _MAX_BYTES)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder.
        _log.warning(
            "Compiled programs are not kept for later runs: %s. Name another folder in "
            "%s, or set it to 'off'.",
            error,
            _SWITCH,
        )
        return None
    if (
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES" not in os.environ
        and _config("jax_persistent_cache_enable_xla_caches") == _XLA_CACHES_OF_JAX
    ):
        # XLA's own files there have no bound, and one that cannot be written fails the
        # compilation, where JAX only warns.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "")
    # XLA cannot write some large programs for CPUs. JAX warns about each, and compiles
    # it in each run, as it does without a cache.
    warnings.filterwarnings("ignore", _UNWRITABLE, UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def _is_settled_by_user() -> bool:
    """Whether the user turned JAX's cache on or off, in any of JAX's ways."""
    return (
        any(name in os.environ for name in _JAX_VARIABLES)
        or _config("jax_compilation_cache_dir") is not None
        or not _config("jax_enable_compilation_cache")
    )


def _config(name: str) -> object:
    return getattr(jax.config, name)  # JAX makes its options as it is loaded.


def _is_safe(platform: str) -> bool:
    """Whether programs for `platform` can be loaded again without trouble.

    Not those for TPUs: ones for some of the chips, without the first, crash libtpu when
    they are loaded (github.com/jax-ml/jax/issues/38004).
    """
    if platform == "cpu":
        return jaxlib_version() >= _QUIET_ON_CPUS
    return platform in ("gpu", "cuda", "rocm")


def _default_folder(environ: Mapping[str, str]) -> Path:
    return caches_folder(environ) / "compiled"


def _threads(environ: Mapping[str, str]) -> str:
    """Name of the folder for programs that use as many threads as there are here.

    XLA divides loops of a CPU program by the threads that it finds when it compiles,
    and JAX's key says nothing of them: a program from one core would stay on one of 64.
    """
    cores = usable_cores()
    pool = environ.get("NPROC", "")
    return f"threads-{cores}-{pool}" if pool.isdecimal() else f"threads-{cores}"


def _make_writable(folder: Path) -> None:
    """Make `folder`, for this user only, and try to write into it."""
    # The programs are run as they are: nobody else may put one there.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"replicax")


def _trim(base: Path, max_bytes: int) -> None:
    """Delete programs that were not used for longest, down to `max_bytes` in all.

    JAX can do so itself, but only with a package that is not among its dependencies,
    and with a lock on the folder that each compilation would wait for.
    """
    found = []
    for path in base.glob("threads-*/*-cache"):
        try:
            status = path.stat()
        except FileNotFoundError:  # Another process is deleting, too.
            continue
        found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    excess = sum(size for _, size, _ in found) - max_bytes
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size
