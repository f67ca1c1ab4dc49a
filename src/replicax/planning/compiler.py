"""Finds the compilers for TPUs and for NVIDIA GPUs among the installed packages.

They compile without TPUs or GPUs. The TPU compiler is libtpu; the CUDA compiler is
JAX's plugin for NVIDIA GPUs.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["LIBRARY_PATH", "find_libtpu", "require_cuda", "require_libtpu"]

LIBRARY_PATH = "TPU_LIBRARY_PATH"
"""Environment variable: the file from which JAX loads libtpu."""

_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def find_libtpu(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Find libtpu's file: the one that `LIBRARY_PATH` names, or the installed one."""
    named = environ.get(LIBRARY_PATH)
    if named and Path(named).is_file():
        return Path(named)
    package = importlib.util.find_spec("libtpu")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).with_name("libtpu.so")
    return file if file.is_file() else None


def require_libtpu(topology: str) -> Path:
    """Return libtpu's file; without it, raise an error with the install command."""
    file = find_libtpu()
    if file is None:
        raise ImportError(
            f"plan: compiling for {topology} needs the TPU compiler, libtpu, which is "
            "not installed. It needs Linux on x86-64 and 700 MB on the disk, but no "
            "TPU. "
            "Install it with: pip install 'replicax[tpu]'"
        )
    return file


def require_cuda(topology: str) -> None:
    """Raise unless the CUDA compiler is installed in the version that JAX loads."""
    installed = {plugin: _version_of(plugin) for plugin in _CUDA_PLUGINS}
    installed = {plugin: version for plugin, version in installed.items() if version}
    jax_version = _version_of("jaxlib")
    if jax_version in installed.values():
        return
    if not installed:
        raise ImportError(
            f"plan: compiling for {topology} needs the CUDA compiler, JAX's plugin for "
            "NVIDIA GPUs, which is not installed. It needs Linux and 5 GB on the disk, "
            "but no GPU. Install it with: pip install 'replicax[plan-cuda]'"
        )
    plugin, version = next(iter(installed.items()))
    extra = plugin.removeprefix("jax-").removesuffix("-plugin")
    raise ImportError(
        f"plan: compiling for {topology} needs the CUDA compiler in the version of "
        f"JAX: {plugin} is {version}, and jaxlib is {jax_version}. Install "
        f"the plugin for this jaxlib with: pip install 'jax[{extra}]=={jax_version}'"
    )


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
