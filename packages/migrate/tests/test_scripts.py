"""Scripts as they are usually written, ported by the command and run to the end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 200

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(TIMEOUT_S + 40),
]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process on the CPU."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", **variables}


def migrate(name: str, folder: Path) -> Path:
    """A script of this folder, ported by the command; nothing may be left."""
    script = folder / name
    script.write_bytes((SCRIPTS / f"{name}.txt").read_bytes())
    start = "from replicax.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "migrate", "--write", name],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr  # Ported, not run.
    assert f"{name}: nothing is left to port by hand" in done.stderr
    assert b"tensorflow" not in script.read_bytes()
    return script


def run(script: Path, *arguments: str, num_devices: int = 2) -> str:
    """What a script prints, on logical devices."""
    start = (
        f"import runpy, sys, replicax; replicax.set_logical_devices({num_devices}); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", start, str(script), *arguments],
        cwd=script.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def number(output: str, name: str) -> float:
    """The last number that was printed after a name."""
    return float(re.findall(rf"{name} (-?[\d.]+)", output)[-1])


@pytest.fixture
def images() -> dict[str, np.ndarray]:
    """Digits `uint8[N, 8, 8]` in 0..255 with their classes, in MNIST's names."""
    digits, labels = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(digits))
    x = (digits[order].reshape(-1, 8, 8) * (255 / 16)).astype("uint8")
    y = labels[order].astype("int64")
    return {
        "x_train": x[:1536],
        "y_train": y[:1536],
        "x_test": x[1536:],
        "y_test": y[1536:],
    }


def test_cifar10_on_several_gpus(tmp_path: Path, images: dict[str, np.ndarray]) -> None:
    for key in ("x_train", "x_test"):  # `uint8[N, 16, 16, 3]`, labels `[N, 1]`.
        large = np.kron(images[key], np.ones((1, 2, 2), "uint8"))[..., None]
        images[key] = np.repeat(large, 3, axis=-1)
    for key in ("y_train", "y_test"):
        images[key] = images[key][:, None]
    np.savez(tmp_path / "data.npz", **images)
    script = migrate("cifar10_multi_gpu.py", tmp_path)
    output = run(script, "--data=data.npz", "--epochs=4", "--batch_size=32")
    assert "Number of devices: 2" in output
    assert number(output, "test accuracy") > 0.8
    assert (tmp_path / "cifar10.h5").exists()


def test_gan_with_a_custom_loop(tmp_path: Path, images: dict[str, np.ndarray]) -> None:
    np.savez(tmp_path / "digits.npz", **images)
    script = migrate("gan_custom_loop.py", tmp_path)
    output = run(script, "--epochs=6")
    assert number(output, "generator") > 0
    # Noise of a generator that has learnt nothing is about 0.7 away.
    assert number(output, "distance") < 0.35
    assert "checkpoint ckpt-" in output


def test_mnist_with_parameter_servers(
    tmp_path: Path, images: dict[str, np.ndarray]
) -> None:
    pytest.importorskip("pyarrow")
    for key in ("x_train", "x_test"):
        large = np.kron(images[key], np.ones((1, 3, 3), "uint8"))
        images[key] = np.pad(large, [(0, 0), (2, 2), (2, 2)])
    np.savez(tmp_path / "mnist.npz", **images)
    script = migrate("mnist_parameter_server.py", tmp_path)
    start = "from replicax.cli import main; main()"
    tasks = ["--workers", "2", "--ps", "1", "--grace-seconds", "5"]
    done = subprocess.run(
        [sys.executable, "-c", start, "run", *tasks, script.name],
        cwd=tmp_path,
        env=environment(MNIST="mnist.npz"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert number(done.stdout, "test accuracy") > 0.8
