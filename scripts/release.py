"""Build a release of the three distributions, try it, and print how to upload it.

    make release

The script builds the sdist and the wheel of each distribution into `dist/`, and tries
the wheels on each Python of `pyproject.toml`'s classifiers, with the oldest and with
the newest dependencies that `pyproject.toml` allows. It uploads nothing.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DISTRIBUTIONS", "VERSIONS", "build", "call", "refusals", "try_out"]

DISTRIBUTIONS = {
    "replicax": ".",
    "replicax_estimator": "packages/estimator",
    "replicax_migrate": "packages/migrate",
}
"""The folder of each distribution."""

VERSIONS = {
    "src/replicax/_version.py": r'^__version__ = "(.+)"',
    "CITATION.cff": r"^version: (.+)",
    "packages/estimator/pyproject.toml": r'^version = "(.+)"|"replicax==(.+)"',
    "packages/migrate/pyproject.toml": r'^version = "(.+)"|"replicax==(.+)"',
}
"""The files that have a version, and the lines in which they have it."""

_PROGRAM = """
import sys
import replicax as rx
rx.set_logical_devices(2)
import keras
import numpy as np
import replicax_migrate

assert rx.__file__.startswith(sys.prefix), rx.__file__

def weights(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x, y = np.arange(28, dtype="float32").reshape(7, 4), np.ones((7, 1), "float32")
    model.fit(x, y, batch_size=4, verbose=0)
    checkpoint = rx.Checkpoint(model=model)
    checkpoint.restore(checkpoint.save(f"{sys.argv[1]}/checkpoint"))
    return model.get_weights()

one, two = weights(rx.OneDeviceStrategy("cpu:0")), weights(rx.MirroredStrategy())
for a, b in zip(one, two, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)
rx.estimator.BaselineRegressor()
ported = replicax_migrate.port(b"import tensorflow as tf\\nx = tf.abs(y)\\n")
assert b"x = keras.ops.abs(y)\\n" in ported.source, ported.source
"""


def main(root: Path) -> int:
    """Make the release of the checkout `root`, and return the exit status."""
    if problems := list(refusals(root)):
        print("\n".join(f"error: {problem}" for problem in problems))
        return 1
    dist = root / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for folder in DISTRIBUTIONS.values():
        build(root / folder, dist)
    call(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
    for python in re.findall(r":: (3\.\d+)\"", pyproject):
        for resolution in ("lowest-direct", "highest"):
            with tempfile.TemporaryDirectory() as folder:
                _install(root, Path(folder), python, resolution)
                print(f"Python {python}, {resolution}:", try_out(Path(folder)))
    print("Nothing was uploaded. To upload: twine upload dist/*")
    return 0


def refusals(root: Path) -> Iterator[str]:
    """Yield why the checkout `root` cannot be released, each with the way out."""
    if changes := call("git", "status", "--porcelain", folder=root).splitlines():
        names = ", ".join(change[3:] for change in changes)
        yield f"files have changes: {names}; commit them"
    versions: dict[str, set[str]] = {}
    for name, pattern in VERSIONS.items():
        text = (root / name).read_text(encoding="utf-8")
        for match in re.finditer(pattern, text, re.MULTILINE):
            version = match.group(match.lastindex or 0)
            versions.setdefault(version, set()).add(name)
    if len(versions) > 1:
        listed = [f"{v} in {', '.join(sorted(names))}" for v, names in versions.items()]
        yield f"the versions differ: {'; '.join(listed)}; make them equal"
        return
    (version,) = versions
    for folder in DISTRIBUTIONS.values():
        changelog = root / folder / "CHANGELOG.md"
        if f"\n## [{version}]" not in changelog.read_text(encoding="utf-8"):
            name = changelog.relative_to(root)
            yield f"{name} has no section for {version}; add '## [{version}] - DATE'"


def call(*command: object, folder: Path | None = None) -> str:
    """Return a command's output; raise if it fails. It gets no PYTHONPATH."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**variables, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stdout}")
    return done.stdout


def build(source: Path, dist: Path, *options: str) -> None:
    """Build the sdist of a distribution, and the wheel from its sdist, into `dist`."""
    call(sys.executable, "-m", "build", *options, "--outdir", dist, source)


def _install(root: Path, environment: Path, python: str, resolution: str) -> None:
    uv = [sys.executable, "-m", "uv"]
    call(*uv, "venv", "--python", python, environment)
    # Dependencies of the wheels are indirect; named themselves, they are lowered too.
    projects = [root / folder / "pyproject.toml" for folder in DISTRIBUTIONS.values()]
    named = [part for project in projects for part in ("--requirements", project)]
    options = ["--python", environment, "--resolution", resolution]
    call(*uv, "pip", "install", *options, *named, *(root / "dist").glob("*.whl"))


def try_out(environment: Path) -> str:
    """Use the wheels in an environment; return the versions of the main packages."""
    binaries = environment / "bin"
    call(binaries / "python", "-c", _PROGRAM, environment, folder=environment)
    call(binaries / "replicax", "migrate", "--help")
    return call(binaries / "replicax", "info").partition("backend")[0].strip()


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
