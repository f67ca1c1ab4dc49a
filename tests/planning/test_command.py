"""`replicax plan`, in a process of its own, on scripts as people write them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replicax.cli import app

FIT = """
import sys
import keras, numpy as np
import replicax as rx

rx.set_logical_devices(2)
strategy = rx.MirroredStrategy(["gpu:0", "gpu:1"])
batch = 16 * strategy.num_replicas_in_sync
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
x, y = np.ones((3 * batch, 8), "float32"), np.ones((3 * batch, 4), "float32")
print("arguments", sys.argv[1:], "loss", model.evaluate(x, y, verbose=0)[0])
try:
    model.fit(x, y, batch_size=batch, verbose=0)
except Exception:
    print("not reached")
print("not reached")
"""

LOOP = """
import keras, numpy as np
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.1)
size = 16 * strategy.num_replicas_in_sync
x, y = np.ones((3 * size, 8), "float32"), np.ones((3 * size, 4), "float32")
dataset = strategy.experimental_distribute_dataset((x, y), batch_size=size)

def probe(batch):
    return keras.ops.mean(model(batch[0]))

def train_step(batch):
    x, y = batch
    with rx.GradientTape() as tape:
        losses = keras.losses.mean_squared_error(y, model(x))
        loss = rx.compute_average_loss(losses, global_batch_size=size)
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
    return loss

for batch in dataset:
    mean = strategy.reduce("mean", strategy.run(probe, (batch,)))
    print("probe", float(mean))
    strategy.run(train_step, (batch,))
    print("not reached")
"""

OWN_JIT = """
import jax, jax.numpy as jnp, numpy as np, optax
import replicax as rx

strategy = rx.FullyShardedStrategy()
optimizer = optax.adam(0.1)
size = 64 * strategy.num_replicas_in_sync

def train_step(state, batch):
    params, adam = state
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    updates, adam = optimizer.update(grads, adam, params)
    return (optax.apply_updates(params, updates), adam), loss

params = strategy.init(jax.random.normal, jax.random.key(0), (256, 256))
state = (params, strategy.init(optimizer.init, params))
layout = jax.tree.map(lambda x: x.sharding, state)
jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(layout, None))
step = strategy.watch(jitted)
x = np.ones((2 * size, 256), "float32")
for batch in strategy.experimental_distribute_dataset(x, batch_size=size):
    state, loss = step(state, strategy.global_batch(batch))
    print("not reached", float(loss))
"""


def replicax(
    *arguments: object, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    code = "from replicax.cli import main; main()"
    environment = {
        "COLUMNS": "120",
        "KERAS_BACKEND": "jax",
        "REPLICAX_TESTS_XLA_FLAGS": "",
    }
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def _stderr_lines(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines on stderr, except reminders on a loaded machine."""
    return [x for x in ended.stderr.splitlines() if not x.endswith("s so far)")]


@pytest.fixture
def fit(tmp_path: Path) -> Path:
    script = tmp_path / "fit.py"
    script.write_text(FIT)
    return script


@pytest.mark.usefixtures("tpu_compiler")
def test_fit_for_a_slice(fit: Path, tmp_path: Path) -> None:
    plan, figure = tmp_path / "plan.json", tmp_path / "plan.png"
    ended = replicax(
        *("plan", "--topology", "v5e:2x4", "--json", plan, "--figure", figure),
        *(fit, "--epochs", "3"),
    )
    assert ended.returncode == 0, ended.stderr
    assert "arguments ['--epochs', '3'] loss 0.0" in ended.stdout
    assert "not reached" not in ended.stdout
    assert "Sequential.train_step" in ended.stdout
    assert "First limit" in ended.stdout
    lines = _stderr_lines(ended)
    assert len(lines) == 1, ended.stderr  # libtpu logs nothing.
    assert "Sequential.test_step does not train" in lines[0]
    values = json.loads(plan.read_text())
    assert values["num_replicas"] == values["num_devices"] == 8
    gradients = 4 * (8 * 4 + 4)
    sums = sum(c["bytes"] * c["count"] for c in values["collectives"])
    assert gradients <= sums <= gradients + 64
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_custom_loop_for_cpus(tmp_path: Path) -> None:
    script, plan = tmp_path / "loop.py", tmp_path / "plan.json"
    script.write_text(LOOP)
    ended = replicax("plan", "--topology", "cpu:8", "--json", plan, script)
    assert ended.returncode == 0, ended.stderr
    assert "probe 0.0" in ended.stdout
    assert "not reached" not in ended.stdout
    values = json.loads(plan.read_text())
    assert values["program"] == "train_step"
    assert values["num_replicas"] == 8
    assert values["scaling"] == []
    assert values["rates"]["source"].startswith("measured on 8 x cpu")


@pytest.mark.usefixtures("tpu_compiler")
def test_a_watched_step(tmp_path: Path) -> None:
    script, plan = tmp_path / "own.py", tmp_path / "plan.json"
    script.write_text(OWN_JIT)
    ended = replicax("plan", "--topology", "v5e:4x4", "--json", plan, script)
    assert ended.returncode == 0, ended.stderr
    assert "not reached" not in ended.stdout
    values = json.loads(plan.read_text())
    assert values["program"] == "train_step"
    assert values["num_replicas"] == values["num_devices"] == 16
    # The weights are gathered; the TPU multiplies in bfloat16.
    gathered = [c["bytes"] for c in values["collectives"] if c["kind"] == "all-gather"]
    assert gathered == [2 * 256 * 256]
    # A sixteenth of the weights and of Adam's state, and of the batch.
    arguments = 3 * 4 * 256 * 256 // 16 + 4 * 64 * 256
    assert arguments < values["memory"]["arguments"] < arguments + 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "returncode", "message"),
    [
        (
            "import replicax as rx\nrx.MirroredStrategy()\n",
            1,
            "without a training step",
        ),
        ("raise SystemExit(7)\n", 7, ""),
        ("def f():\n    raise KeyError('mine')\nf()\n", 1, "in f\n.*KeyError: 'mine'"),
        (
            "import replicax as rx\n"
            "rx.CentralStorageStrategy(['cpu:0'], parameter_device='cpu:0')\n",
            1,
            "live apart",
        ),
    ],
    ids=["no step", "exit", "error", "variables elsewhere"],
)
def test_scripts_without_a_training_step_are_errors(
    text: str, returncode: int, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    ended = replicax("plan", "--topology", "cpu:2", script)
    assert ended.returncode == returncode
    lines = ended.stderr.splitlines()
    assert all(part in ended.stderr for part in message.split("\n.*")), lines


@pytest.mark.slow
@pytest.mark.usefixtures("tpu_compiler")
def test_a_module_on_one_device_of_a_slice(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        FIT.replace(
            'MirroredStrategy(["gpu:0", "gpu:1"])', 'OneDeviceStrategy("gpu:0")'
        )
    )
    plan = tmp_path / "plan.json"
    ended = replicax(
        *("plan", "--topology", "v5p:2x2x1", "--json", plan, "-m", "package.train"),
        folder=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    values = json.loads(plan.read_text())
    assert values["num_devices"] == 1
    assert values["collectives"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.py"], "There is no script 'none.py'"),
        (["--topology", "h100:9", "fit.py"], "there is no cluster 'h100:9'"),
        (["--topology", "h100:8", "--link-bandwidth", "0", "fit.py"], "more than 0"),
        (["--json", "no/plan.json", "fit.py"], "There is no folder for"),
    ],
)
@pytest.mark.usefixtures("fit")
def test_wrong_options_are_errors(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert message in result.output
