"""The compilers for TPUs and GPUs: found, or named with the command to install them."""

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax._src import xla_bridge
from typer.testing import CliRunner

from replicax._private.jax import is_tpu_vm
from replicax.cli import app
from replicax.cluster import tpu_slice
from replicax.planning import compiler
from replicax.planning.topology import find_topology


@pytest.fixture
def _without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "libtpu" else find_spec(name, *a),
    )


def test_the_libtpu_in_the_environment_is_preferred(tmp_path: Path) -> None:
    own = tmp_path / "mine.so"
    own.touch()
    assert compiler.find_libtpu({"TPU_LIBRARY_PATH": str(own)}) == own


@pytest.mark.usefixtures("_without_libtpu")
def test_a_plan_without_libtpu_names_the_install_command(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('ran')")
    arguments = ["plan", "--topology", "v5e:2x4", str(script)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "compiling for v5e:2x4 needs the TPU compiler" in result.stderr
    assert result.stderr.endswith("pip install 'replicax[tpu]'\n")
    assert "ran" not in result.output
    with pytest.raises(ImportError, match="v5e:2x4 needs the TPU compiler"):
        find_topology("v5e:2x4")


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of installed packages: to be changed."""
    installed = {"jaxlib": "0.10.2"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return installed


def test_a_missing_cuda_compiler_names_the_command(versions: dict[str, str]) -> None:
    with pytest.raises(ImportError) as caught:
        compiler.require_cuda("h100:8")
    error = str(caught.value)
    assert error.startswith("plan: compiling for h100:8 needs the CUDA compiler")
    assert error.endswith("Install it with: pip install 'replicax[plan-cuda]'")
    versions["jax-cuda13-plugin"] = "0.10.2"
    compiler.require_cuda("h100:8")


def test_a_cuda_compiler_of_another_version_is_refused(
    versions: dict[str, str],
) -> None:
    versions["jax-cuda12-plugin"] = "0.9.1"
    with pytest.raises(ImportError) as caught:
        compiler.require_cuda("h100:8")
    error = str(caught.value)
    assert "jax-cuda12-plugin is 0.9.1, and jaxlib is 0.10.2" in error
    assert error.endswith("pip install 'jax[cuda12]==0.10.2'")


# Where libtpu is installed beside JAX, and there are no TPUs.


@pytest.mark.slow
@pytest.mark.skipif(
    is_tpu_vm() or importlib.util.find_spec("libtpu") is None,
    reason="there are TPUs here, or libtpu is not installed",
)
@pytest.mark.timeout(120)
def test_an_installed_libtpu_logs_nothing_and_leaves_sigterm() -> None:
    code = (
        "import replicax as rx, time\n"
        "print(rx.MirroredStrategy().num_replicas_in_sync, flush=True)\n"
        "time.sleep(100)"
    )
    names = ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_LIBRARY_PATH")
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k not in names},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    said = [x for x in errors.splitlines() if not x.endswith("s so far)")]
    assert not said


@pytest.mark.parametrize(
    ("environ_of", "platforms", "files", "skips"),
    [
        ({}, None, (), True),
        ({"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "/a.so"}, None, (), True),
        ({"TPU_WORKER_ID": "0"}, None, (), False),
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-4"}, None, (), False),
        ({"JAX_FORCE_TPU_INIT": "1"}, None, (), False),
        ({}, "tpu,cpu", (), False),
        ({}, None, ("accel0",), False),
        ({}, None, ("vfio/0",), False),
        ({}, None, ("null", "vfio/vfio"), True),
    ],
)
def test_environments_that_name_tpus_keep_the_platform(
    environ_of: dict[str, str],
    platforms: str | None,
    files: tuple[str, ...],
    skips: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    before = jax.config.jax_platforms
    # This process' devices are started.
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    found = xla_bridge.BackendRegistration(lambda: None, priority=300)
    monkeypatch.setitem(xla_bridge._backend_factories, "tpu", found)
    try:
        jax.config.update("jax_platforms", platforms)
        done = tpu_slice.skip_libtpu_without_chips(environ_of, str(tmp_path))
    finally:
        jax.config.update("jax_platforms", before)
    assert done is skips
    assert "tpu" in xla_bridge.known_platforms()  # Or Pallas cannot be imported.
    assert (xla_bridge._backend_factories["tpu"] is found) is not skips
