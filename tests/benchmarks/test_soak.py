"""Many collectives in flight on logical CPU devices must never wait for each other.

XLA's CPU collectives block one thread of the pool per device. With too small a pool the
steps hang; a process of its own shows that, and can be ended.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import replicax as rx

num_devices, num_steps = map(int, sys.argv[1:])
rx.set_logical_devices(num_devices)

import keras
import numpy as np
from keras import ops

strategy = rx.MirroredStrategy()
with strategy.scope():
    weights = [keras.Variable(np.eye(64, dtype="float32")) for _ in range(8)]
    optimizer = keras.optimizers.SGD(0.01)


def step(x):
    context = rx.get_replica_context()
    with rx.GradientTape() as tape:
        for w in weights:
            x = ops.tanh(x @ w)
            x = x - context.all_reduce("mean", ops.mean(x, axis=0))
        loss = context.all_reduce("mean", ops.mean(x**2))
    optimizer.apply(tape.gradient(loss, weights), weights)
    return loss


x = np.random.default_rng(0).normal(size=(num_devices, 16, 64)).astype("float32")
x = rx.PerReplica(x)
losses = [strategy.run(step, (x,)) for _ in range(num_steps)]  # Nothing waits in here.
values = np.array([np.asarray(loss) for loss in losses])
assert values.shape == (num_steps,), values.shape
assert np.isfinite(values).all()
assert values[-1] != values[0]
strategy.check_replicas()
print("finished", num_steps)
"""


def soak(num_devices: int, num_steps: int, timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(num_devices), str(num_steps)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["finished", str(num_steps)]


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 8])
def test_collectives_in_flight_do_not_hang(num_devices) -> None:
    soak(num_devices, num_steps=100, timeout_s=150)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_devices", [8])
def test_collectives_in_flight_do_not_hang_for_long(num_devices) -> None:
    soak(num_devices, num_steps=2000, timeout_s=800)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", ["devices", "workers", "servers"])
def test_the_beginning_of_make_soak(job) -> None:
    """Four kills in a row, after which the job has got on, are no crash loop."""
    script = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    # So short a run is warming up for most of its time.
    options = ("--steps-scale", "0.1", "--kills", "4", "--growth-limit", "0.5")
    done = subprocess.run(
        [sys.executable, str(script), "--only", job, *options],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.endswith("Nothing was lost, and nothing grows.\n")
