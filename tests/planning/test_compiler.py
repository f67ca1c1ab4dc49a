"""The TPU compiler among the user's caches, installed by the real pip."""

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import pytest
from jax._src import xla_bridge

from replicax._private.jax import is_tpu_vm
from replicax.cluster import tpu_slice
from replicax.planning import compiler

pytestmark = pytest.mark.skipif(
    not compiler.is_supported(), reason="there is no TPU compiler for this machine"
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment whose caches are empty, and whose package index holds nothing."""
    (tmp_path / "index").mkdir()
    kept = {k: v for k, v in os.environ.items() if k != compiler.LIBRARY_PATH}
    return kept | {
        "XDG_CACHE_HOME": str(tmp_path / "caches"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "PIP_CONFIG_FILE": os.devnull,
    }


@pytest.fixture
def _without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "libtpu" else found(name, *a),
    )


def add_wheel(environ: dict[str, str], content: str = "the compiler") -> None:
    """A wheel of libtpu, as small as can be, in the package index."""
    version = compiler.requirement().partition("==")[2].replace("*", "7") or "1.0"
    folder = f"libtpu-{version}.dist-info"
    path = Path(environ["PIP_FIND_LINKS"], f"libtpu-{version}-py3-none-any.whl")
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("libtpu/libtpu.so", content)
        wheel.writestr(
            f"{folder}/METADATA",
            f"Metadata-Version: 2.1\nName: libtpu\nVersion: {version}\n"
            "Requires-Dist: never-installed-with-it\n",
        )
        wheel.writestr(
            f"{folder}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{folder}/RECORD", "")


@pytest.mark.usefixtures("_without_libtpu")
def test_it_is_installed_among_the_caches_and_found(environ: dict[str, str]) -> None:
    assert compiler.find(environ) is None
    add_wheel(environ)
    file = compiler.install(environ)
    assert file.read_text() == "the compiler"
    assert file.is_relative_to(Path(environ["XDG_CACHE_HOME"], "replicax"))
    assert compiler.find(environ) == file
    assert compiler.install(environ) == file  # As two processes may do at once.
    assert [p.name for p in file.parents[2].iterdir()] == [file.parents[1].name]


def test_one_that_is_named_comes_first(environ: dict[str, str], tmp_path: Path) -> None:
    own = tmp_path / "mine.so"
    own.touch()
    assert compiler.find({**environ, "TPU_LIBRARY_PATH": str(own)}) == own


def test_without_an_index_the_error_has_the_command(environ: dict[str, str]) -> None:
    with pytest.raises(ImportError) as caught:
        compiler.install(environ)
    error = str(caught.value)
    assert "No matching distribution found for libtpu" in error
    assert "pip install --no-deps --target" in error
    assert compiler.requirement().removesuffix("*") in error
    folder = Path(environ["XDG_CACHE_HOME"], "replicax")
    assert not list(folder.iterdir()), "something half installed is left"


@pytest.mark.slow
def test_plan_without_the_compiler_names_the_command(
    environ: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('ran')")
    code = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "sys.modules['libtpu'] = None\n"
        "importlib.util.find_spec = (\n"
        "    lambda name, *a: None if name == 'libtpu' else found(name, *a)\n"
        ")\n"
        "from replicax.cli import main; main()"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, "plan", "--topology", "v5e:2x4", str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 1, process.stderr
    first, *_, last = process.stderr.splitlines()
    assert first.startswith("Installing the TPU compiler, libtpu")
    assert last.startswith("Install it with: pip install --no-deps --target")
    assert "ran" not in process.stdout + process.stderr


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
def test_an_installed_libtpu_is_neither_heard_nor_in_the_way_of_sigterm() -> None:
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
def test_anything_that_speaks_of_tpus_leaves_jax_alone(
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
