"""The three distributions: built, and installed into an empty environment."""

import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import replicax
from release import DISTRIBUTIONS, VERSIONS, build, call, refusals, try_out

ROOT = Path(__file__).parents[1]
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


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each distribution, built from its sdist."""
    paths = {}
    for name, source in DISTRIBUTIONS.items():
        folder = tmp_path_factory.mktemp(name)
        build(ROOT / source, folder, "--no-isolation")
        (paths[name],) = folder.glob("*.whl")
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
    try_out(environment)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed checkout with versions and changelogs that can be released."""
    root = tmp_path_factory.mktemp("checkout")
    changelogs = [Path(source) / "CHANGELOG.md" for source in DISTRIBUTIONS.values()]
    for name in [*VERSIONS, *changelogs]:
        text = (ROOT / name).read_text()
        text = text.replace("[Unreleased]: ", "[").replace(
            f"[{replicax.__version__}\n", f"[{replicax.__version__}] - 2030-01-01\n"
        )
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    call("git", "init", "--quiet", folder=root)
    call("git", "add", ".", folder=root)
    call("git", *author, "commit", "--quiet", "--message", "Begin", folder=root)
    return root


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("CITATION.cff", "version: 0", "version: 9", "the versions differ: "),
        ("packages/migrate/pyproject.toml", "replicax==0", "replicax==9", "differ"),
        ("packages/estimator/pyproject.toml", 'version = "0', 'version = "9', "differ"),
        ("CHANGELOG.md", "## [0", "## [9", "CHANGELOG.md has no section for 0"),
        ("packages/migrate/CHANGELOG.md", "## [0", "## [9", "packages/migrate/CHA"),
    ],
)
def test_a_release_is_refused(
    checkout: Path, name: str, old: str, new: str, problem: str
) -> None:
    assert list(refusals(checkout)) == []
    text = (checkout / name).read_text()
    assert text.count(old) == 1
    (checkout / name).write_text(text.replace(old, new))
    try:
        dirty, other = refusals(checkout)
    finally:
        (checkout / name).write_text(text)
    assert dirty == f"files have changes: {name}; commit them"
    assert problem in other
