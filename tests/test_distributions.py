"""The three distributions: built, and installed into an empty environment."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import replicax

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {
    "replicax": ROOT,
    "replicax_estimator": ROOT / "packages" / "estimator",
    "replicax_migrate": ROOT / "packages" / "migrate",
}
DATA = {
    "replicax": [
        "py.typed",
        "planning/devices.toml",
        "report/templates/page.html",
    ],
    "replicax_estimator": ["py.typed"],
    "replicax_migrate": ["py.typed", "tables.toml"],
}

pytestmark = pytest.mark.timeout(120)


def call(*command: object, folder: Path | None = None) -> str:
    """What a command prints; it must succeed, and finds no checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a distribution's wheel or sdist."""
    call(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        kind,
        "-d",
        folder,
        folder=source,
    )
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, built from its sdist."""
    paths = {}
    for name, source in DISTRIBUTIONS.items():
        folder = tmp_path_factory.mktemp(name)
        sdist = build("sdist", source, folder / "sdist")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        unpacked = folder / sdist.name.removesuffix(".tar.gz")
        paths[name] = build("wheel", unpacked, folder / "wheel")
    return paths


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of this one, but none of the distributions."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", folder)
    here = Path(sysconfig.get_path("purelib"))
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for path in here.iterdir():
        if "replicax" not in path.name:
            (there / path.name).symlink_to(path)
    return folder


def install(environment: Path, wheel: Path) -> None:
    python = environment / "bin" / "python"
    options = ["--no-deps", "--no-index", "--no-compile", "--ignore-installed"]
    call(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_has_its_data_and_version(name: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[name]) as archive:
        names = set(archive.namelist())
    assert {f"{name}/{path}" for path in DATA[name]} <= names
    folders = {path.partition("/")[0] for path in names}
    version = replicax.__version__
    assert folders == {name, f"{name}-{version}.dist-info"}


MISSING = """
import sys
import replicax as rx
assert rx.__file__.startswith(sys.prefix), rx.__file__
try:
    rx.estimator.Estimator
except ModuleNotFoundError as error:
    print(error)
"""
THERE = """
import replicax as rx
import replicax_migrate
print(rx.estimator.Estimator.__name__, rx.feature_column.numeric_column("x").key)
ported = replicax_migrate.port(b"import tensorflow as tf\\nx = tf.abs(y)\\n")
print(ported.source.decode())
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_distribution_adds_its_part(
    wheels: dict[str, Path], environment: Path
) -> None:
    python, command = environment / "bin" / "python", environment / "bin" / "replicax"
    install(environment, wheels["replicax"])
    assert "pip install replicax-estimator" in call(python, "-c", MISSING)
    assert "migrate" not in call(command, "--help")
    install(environment, wheels["replicax_estimator"])
    install(environment, wheels["replicax_migrate"])
    printed = call(python, "-c", THERE)
    assert "Estimator x\n" in printed
    assert "x = keras.ops.abs(y)\n" in printed
    assert "migrate" in call(command, "--help")
