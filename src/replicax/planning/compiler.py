"""Finds the compilers for TPUs and GPUs, and installs the one for TPUs.

An installed libtpu is loaded by every JAX process of its environment. On a machine
without TPUs it prints alarming lines there and replaces what SIGTERM does. So it lies
in a folder of its own among the user's caches, and only plans are told of it.

The CUDA compiler is JAX's plugin for NVIDIA GPUs, with its libraries. It is a package
of the environment: without a GPU it does nothing there.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from replicax._util.files import caches_folder, part_of, publish, temporary_folder

__all__ = ["LIBRARY_PATH", "find", "how_to_install", "install", "require_cuda"]

LIBRARY_PATH = "TPU_LIBRARY_PATH"
"""Environment variable: where JAX takes libtpu from."""

_OPTIONS = ("install", "--no-deps", "--target")
_INSTALL_SECONDS = 1800.0
_SHOWN_LINES = 5

_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def find(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Find the compiler's file: the one that is named, installed, or in the caches."""
    named = environ.get(LIBRARY_PATH)
    if named and Path(named).is_file():
        return Path(named)
    installed = importlib.util.find_spec("libtpu")
    folders = [Path(installed.origin).parent] if installed and installed.origin else []
    files = [*(folder / "libtpu.so" for folder in folders), _own_file(environ)]
    return next((file for file in files if file.is_file()), None)


def install(environ: Mapping[str, str] = os.environ) -> Path:
    """Put the compiler into the user's caches, from the package index."""
    file = _own_file(environ)
    folder = file.parents[1]
    if not is_supported():
        raise ImportError(
            "The TPU compiler, libtpu, is there for Linux on x86-64 only; this is "
            f"{platform.system()} on {platform.machine()}. Plan on such a machine."
        )
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = folder.with_name(f"{folder.name}-{os.getpid()}")
    with temporary_folder(part_of(own)) as part:
        why = _run([*_installer(), str(part), requirement()], environ)
        if why is None and not (part / "libtpu" / "libtpu.so").is_file():
            why = f"{requirement()} holds no libtpu/libtpu.so"
        if why is not None:
            raise ImportError(
                f"The TPU compiler could not be installed: {why}\n{how_to_install()}"
            )
        if not file.is_file():  # Another process may have been faster.
            publish(part, folder, replace=True)
    return file


def how_to_install(environ: Mapping[str, str] = os.environ) -> str:
    """The command that installs the compiler where `find` looks."""
    folder = _own_file(environ).parents[1]
    command = shlex.join(["pip", *_OPTIONS, str(folder), requirement()])
    return f"Install it with: {command} (Linux on x86-64)."


def is_supported() -> bool:
    """Whether there is a TPU compiler for this kind of machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def requirement() -> str:
    """The version of libtpu that the installed JAX names."""
    for line in importlib.metadata.requires("jax") or ():
        found = re.match(r"libtpu\s*([^;\s]*)\s*;", line)
        if found:
            return f"libtpu{found[1]}"
    return "libtpu"


def require_cuda(name: str) -> None:
    """Raise unless the CUDA compiler is here, as the plugin that JAX will load."""
    found = {plugin: _version_of(plugin) for plugin in _CUDA_PLUGINS}
    found = {plugin: version for plugin, version in found.items() if version}
    jax_version = _version_of("jaxlib")
    if jax_version in found.values():
        return
    command = "pip install 'replicax[plan-cuda]'"
    if not found:
        raise ImportError(
            f"plan: compiling for {name} needs the CUDA compiler, JAX's plugin for "
            "NVIDIA GPUs, which is not installed. It needs no GPU, Linux, and 5 GB on "
            f"the disk. Install it with: {command}"
        )
    plugin, version = next(iter(found.items()))
    extra = plugin.removeprefix("jax-").removesuffix("-plugin")
    raise ImportError(
        f"plan: compiling for {name} needs the CUDA compiler in the version of JAX: "
        f"{plugin} is {version}, and jaxlib is {jax_version}, which does not load it. "
        f"Install the right one with: pip install 'jax[{extra}]=={jax_version}'"
    )


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_file(environ: Mapping[str, str]) -> Path:
    name = re.sub(r"[^\w.]+", "-", requirement().replace(".*", ""))
    return caches_folder(environ) / name / "libtpu" / "libtpu.so"


def _installer() -> list[str]:
    """The program that installs packages; uv's environments have no pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", *_OPTIONS]
    uv = shutil.which("uv")
    if uv is None:
        raise ImportError(
            f"There is neither pip nor uv to install the TPU compiler. "
            f"{how_to_install()}"
        )
    return [uv, "pip", *_OPTIONS]


def _run(command: list[str], environ: Mapping[str, str]) -> str | None:
    """Run a command; return why it failed, or None if it did not."""
    try:
        ended = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_INSTALL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ended.returncode == 0:
        return None
    lines = (ended.stderr or ended.stdout).strip().splitlines()
    return "\n".join(lines[-_SHOWN_LINES:]) or f"exit status {ended.returncode}"
