"""The examples, on the digits: run as by a user, on several devices, on two workers."""

import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import replicax as rx
import replicax.testing

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: str, cwd: Path) -> str:
    """What the example prints; it must end well and in time."""
    # A script sizes its own thread pool; that of this process must not count.
    env = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "NPROC")}
    process = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def run_here(name: str, *arguments: str) -> str:
    """What the example prints in this process, whose number of devices is fixed."""
    with (
        mock.patch.object(sys, "argv", [name, *arguments]),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        mock.patch.object(rx, "set_logical_devices"),
        contextlib.redirect_stdout(io.StringIO()) as output,
    ):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return output.getvalue()


def accuracy_in(output: str) -> float:
    (percent,) = re.findall(r"^held-out accuracy +([\d.]+)%", output, re.MULTILINE)
    return float(percent) / 100


def test_digits_mirrored_draws_its_training_curve(tmp_path: Path) -> None:
    output = run_example("digits_mirrored.py", "--replicas=2", cwd=tmp_path)
    assert "Epoch 15/15" in output, "Keras shows its progress"
    assert "replicas           2  MirroredStrategy(cpu:0, cpu:1)" in output
    assert "global batch       64  (32 a replica)" in output
    assert re.search(r"throughput +[\d,]+ examples/s  \(epochs 2 to 15\)", output)
    assert accuracy_in(output) > 0.93
    picture = (tmp_path / "digits_mirrored.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


@pytest.mark.slow
def test_digits_mirrored_takes_a_file(
    tmp_path: Path, digits: tuple[np.ndarray, np.ndarray]
) -> None:
    images = (digits[0].reshape(-1, 8, 8) * 255).astype("uint8")
    labels = digits[1].astype("uint8")
    np.savez(
        tmp_path / "small.npz",
        x_train=images[:256],
        y_train=labels[:256],
        x_test=images[256:320],
        y_test=labels[256:320],
    )
    arguments = ("--data=small.npz", "--replicas=1", "--epochs=1", "--plot=curve.png")
    output = run_example("digits_mirrored.py", *arguments, cwd=tmp_path)
    assert "data               small, 256 training examples" in output
    assert "replicas           1  MirroredStrategy(cpu:0)" in output
    assert "train for two or more" in output
    assert (tmp_path / "curve.png").exists()


def promised_losses(output: str) -> list[float]:
    losses = re.findall(r"(?:training|held-out) loss ([\d.]+)", output)
    assert len(losses) == 2, output
    return [float(loss) for loss in losses]


def test_promise_of_the_numbers_of_one_device() -> None:
    arguments = ("promises.py", "--epochs=4")
    one = run_here(*arguments, "--replicas=1")
    three = run_here(*arguments, "--replicas=3")
    assert promised_losses(three) == pytest.approx(promised_losses(one), rel=1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_promises_of_named_failures_and_exact_resume(tmp_path: Path) -> None:
    script = str(EXAMPLES / "promises.py")
    command = [sys.executable, "-c", "from replicax.cli import main; main()", "run"]

    def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments, "--epochs=4", f"--backup={tmp_path / 'backup'}"],
            capture_output=True,
            text=True,
            timeout=140,
            check=False,
        )

    killed = launch("--workers=2", "--max-restarts=0", script, "--kill-at=45")
    assert killed.returncode == 137, killed.stdout + killed.stderr
    assert "worker:1 was killed by SIGKILL" in killed.stdout + killed.stderr
    resumed = launch("--workers=3", script)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "continues in epoch 2, step 17" in resumed.stdout + resumed.stderr
    one = run_example("promises.py", "--epochs=4", "--replicas=1", cwd=tmp_path)
    losses = promised_losses(resumed.stdout)
    assert losses == pytest.approx(promised_losses(one), rel=1e-5)


@pytest.mark.slow
def test_custom_loop_is_the_same_with_a_tape_and_without(tmp_path: Path) -> None:
    arguments = ("digits_custom_loop.py", "--replicas=2", "--epochs=6")
    tape = run_example(*arguments, cwd=tmp_path)
    functional = run_example(*arguments, "--functional", cwd=tmp_path)
    assert accuracy_in(tape) > 0.9
    assert accuracy_in(functional) == pytest.approx(accuracy_in(tape), abs=0.02)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", tape)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 6


@pytest.mark.slow
def test_loop_in_plain_jax(tmp_path: Path) -> None:
    output = run_example("flax_or_jax_loop.py", "--replicas=2", cwd=tmp_path)
    assert accuracy_in(output) > 0.93
    assert "All replicas hold the same parameters." in output


@pytest.mark.slow
def test_loop_with_optax(tmp_path: Path) -> None:
    arguments = ("optax_loop.py", "--replicas=2", "--epochs=8")
    whole = run_example(*arguments, cwd=tmp_path)
    divided = run_example(*arguments, "--shard-update", cwd=tmp_path)
    assert accuracy_in(whole) > 0.9
    assert accuracy_in(divided) == pytest.approx(accuracy_in(whole), abs=0.01)


def losses_in(output: str) -> list[float]:
    """The losses of the epochs, as rounded as they are printed."""
    return [float(x) for x in re.findall(r"^epoch.* loss ([\d.]+)", output, re.M)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nnx_digits.py", "equinox_digits.py"])
def test_flax_and_equinox_on_one_device_and_on_two(name: str, tmp_path: Path) -> None:
    arguments = (name, "--epochs=10")
    one = run_example(*arguments, "--replicas=1", "--batch-size=64", cwd=tmp_path)
    two = run_example(*arguments, "--replicas=2", "--batch-size=32", cwd=tmp_path)
    assert len(losses_in(one)) == 10
    assert losses_in(two) == pytest.approx(losses_in(one), rel=1e-3, abs=2e-4)
    assert accuracy_in(two) == pytest.approx(accuracy_in(one), abs=0.003)
    assert accuracy_in(two) > 0.95


@pytest.mark.slow
def test_the_equinox_module_that_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.eqx"
    arguments = ("equinox_digits.py", "--epochs=10", f"--save={path}")
    saved = []
    for number in (1, 2):
        run_here(*arguments, f"--replicas={number}", f"--batch-size={64 // number}")
        saved.append(np.load(path))  # The first array of the file.
    np.testing.assert_allclose(*saved, atol=2e-3)


def steps_in(output: str) -> dict[int, float]:
    """The loss of each step that is printed."""
    pairs = re.findall(r"^step +(\d+)  loss ([\d.]+)$", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in pairs}


TRANSFORMER = ("nnx_transformer.py", "--width=64", "--layers=1", "--batch-size=8")
# float32 sums in another order differ by 1e-7, and Adam divides small gradients by
# their own size.
same_losses = functools.partial(pytest.approx, rel=1e-5)


@pytest.mark.slow
def test_a_transformer_resumes_on_another_number_of_devices(tmp_path: Path) -> None:
    def train(*arguments: str) -> dict[int, float]:
        return steps_in(run_here(*TRANSFORMER, *arguments))

    whole = train("--replicas=1", "--steps=20")
    assert list(whole) == [10, 20]
    assert whole[20] < whole[10] < 4, "It learns."
    assert train("--replicas=4", "--steps=10") == same_losses({10: whole[10]})
    saves = f"--checkpoint={tmp_path / 'saved'}"
    assert not train("--replicas=4", "--steps=3", saves)
    assert train("--replicas=2", "--steps=10", saves) == same_losses({10: whole[10]})


WORKER_EXAMPLES = {
    "nnx": ("nnx_digits.py", "--epochs=10", "--batch-size=16"),
    "equinox": ("equinox_digits.py", "--epochs=10", "--batch-size=16"),
    "optax": ("optax_loop.py", "--epochs=8", "--batch-size=16", "--shard-update"),
    "transformer": (*TRANSFORMER, "--steps=10"),
}


def outputs_of_workers(name: str) -> list[str]:
    """What an example prints on each of two workers of two devices."""
    results = replicax.testing.run(
        run_here, num_workers=2, args=WORKER_EXAMPLES[name], logical_devices=2
    )
    return list(results.returned.values())


@pytest.mark.slow(but=["nnx-0.95", "optax-0.9"])
@pytest.mark.multiprocess
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "least_accuracy"), [("nnx", 0.95), ("equinox", 0.95), ("optax", 0.9)]
)
def test_digits_on_two_workers(name: str, least_accuracy: float) -> None:
    chief, other = outputs_of_workers(name)
    assert "replicas           4  MultiWorkerMirroredStrategy(worker:0 of 2 " in chief
    alone = run_here(*WORKER_EXAMPLES[name], "--replicas=4")
    assert losses_in(chief) == pytest.approx(losses_in(alone), rel=1e-3, abs=2e-4)
    assert len(losses_in(chief)) >= 8
    assert accuracy_in(chief) > least_accuracy
    assert "epoch" not in other


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(200)
def test_a_transformer_on_two_workers() -> None:
    chief, other = map(steps_in, outputs_of_workers("transformer"))
    alone = run_here(*WORKER_EXAMPLES["transformer"], "--replicas=2")
    assert list(chief) == [10]
    assert chief == same_losses(steps_in(alone))
    assert not other


@pytest.mark.slow
def test_multi_worker_alone(tmp_path: Path) -> None:
    output = run_example("multi_worker.py", "--epochs=6", cwd=tmp_path)
    assert "replicas           1  MultiWorkerMirroredStrategy(" in output
    assert accuracy_in(output) > 0.85


@pytest.mark.multiprocess
@pytest.mark.timeout(200)
@pytest.mark.slow
def test_multi_worker_on_two(tmp_path: Path) -> None:
    results = replicax.testing.run(
        EXAMPLES / "multi_worker.py",
        num_workers=2,
        args=("--epochs=6", f"--backup={tmp_path / 'backup'}"),
        deadline_seconds=180,
    )
    chief, other = results["worker:0"].output, results["worker:1"].output
    assert "replicas           2  MultiWorkerMirroredStrategy(worker:0 of 2 " in chief
    assert "global batch       64  (32 a replica)" in chief
    assert accuracy_in(chief) > 0.8
    assert "held-out" not in other
    assert "Epoch" not in other


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_parameter_server(tmp_path: Path) -> None:
    results = replicax.testing.run(
        EXAMPLES / "parameter_server.py",
        tasks={"worker": 2, "ps": 2},
        args=("--epochs=8", f"--out={tmp_path}"),
        deadline_seconds=180,
    )
    chief, other = results["worker:0"].output, results["worker:1"].output
    assert accuracy_in(chief) > 0.9
    assert re.search(r"throughput +[\d,]+ examples/s  \(epochs 2 to 8\)", chief)
    assert re.search(r"^worker:1 +staleness [\d.]+ in the mean", chief, re.MULTILINE)
    assert "held-out" not in other
    for name in ("loss_curve.png", "staleness.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_large_embedding() -> None:
    results = replicax.testing.run(
        EXAMPLES / "large_embedding.py",
        tasks={"worker": 2, "ps": 2},
        args=("--rows=100000", "--epochs=3"),
        deadline_seconds=120,
    )
    chief, other = results["worker:0"].output, results["worker:1"].output
    assert "table           6 MiB" in chief
    (percent,) = re.findall(r"^accuracy +([\d.]+)%", chief, re.MULTILINE)
    assert float(percent) > 90
    assert "accuracy" not in other


@pytest.mark.slow
def test_estimator_tabular_in_one_process(tmp_path: Path) -> None:
    output = run_example(
        "estimator_tabular.py",
        f"--model-dir={tmp_path}",
        "--max-steps=150",
        cwd=tmp_path,
    )
    assert "strategy           MirroredStrategy(cpu:0, cpu:1)" in output
    assert "steps              150" in output
    assert accuracy_in(output) > 0.93
    assert output.count("exported model ") == 3


@pytest.mark.slow
@pytest.mark.multiprocess
def test_estimator_tabular_on_two_workers_and_an_evaluator(tmp_path: Path) -> None:
    arguments = [
        *("run", "--workers=2", "--evaluator", str(EXAMPLES / "estimator_tabular.py")),
        *(f"--model-dir={tmp_path}", "--max-steps=150"),
    ]
    process = subprocess.run(
        [sys.executable, "-c", "from replicax.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("This task has trained") == 2
    assert process.stdout.count("exported model ") == 3
