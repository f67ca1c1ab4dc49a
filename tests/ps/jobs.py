"""Jobs with parameter servers, whose tasks tests kill, stop and start again."""

import itertools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import keras
import numpy as np
from tests.ps.boards import serve_streams

import replicax as rx
import replicax.testing
from replicax.ps.message_stream import MessageStream
from replicax.ps.strategy import ParameterServerStrategy

BATCH_SIZE = 16
PACE_SECONDS = 0.03
_RNG = np.random.default_rng(0)
_CENTERS = _RNG.normal(size=(4, 8)).astype("float32")
LABELS = _RNG.integers(0, 4, 320).astype("int32")
POINTS = _CENTERS[LABELS] + 0.3 * _RNG.normal(size=(320, 8)).astype("float32")
TIMEOUTS = {
    "startup": 60,
    "step": 60,
    "heartbeat": 3,
    "server": 40,
    "chief": 40,
}
STOPPED_SECONDS = 15
LONG = {"deadline_seconds": 240}
SERVERS = ("ps:0", "ps:1")
TASKS = ("worker:0", "worker:1", *SERVERS)
# Faults of the fault matrices, and the tasks that have them.
FAULTS = [
    *((fault, (task,)) for fault in ("kill", "stop") for task in TASKS),
    ("kill", ("worker:1", "ps:1")),
    ("kill", ("worker:0", "ps:0")),
    ("kill", SERVERS),
    ("kill", ("worker:0", "worker:1")),
    ("stop", ("worker:1", "ps:0")),
]


# Programs of the tasks.


def network():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.Dense(4),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Watched(keras.callbacks.Callback):
    """Prints this process' steps; on the chief, ends training at the test's request."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy
        self.steps = 0
        self.stop = Path(os.environ["STOP_FILE"])

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        print(f"<{os.getpid()}: step {self.steps}>", flush=True)
        time.sleep(PACE_SECONDS)
        if self.strategy.is_chief and self.stop.exists():
            self.model.stop_training = True


def make(options):
    """Create a job's strategy; `options["timeouts"]` override `TIMEOUTS`."""
    serve_streams()
    timeouts = rx.Timeouts(**TIMEOUTS | options.get("timeouts", {}))
    return ParameterServerStrategy(**options | {"timeouts": timeouts})


def job(options, epochs=1, hook=None):
    """Train until the test ends the job; return the accuracy, and counts of an epoch.

    `finished` steps and those `given_up` add up to the `next` step.
    """
    strategy = make(options)
    print(f"<{os.getpid()}: {strategy!r}>", flush=True)
    with strategy.scope():
        model = network()
    callbacks = [Watched(strategy)]
    if hook is not None:
        callbacks.append(HOOKS[hook](strategy))
    repeats = 500 if epochs == 1 else 1
    model.fit(
        np.tile(POINTS, (repeats, 1)),
        np.tile(LABELS, repeats),
        batch_size=BATCH_SIZE,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    predicted = model.predict(POINTS, verbose=0).argmax(-1)
    accuracy = {"accuracy": float(np.mean(predicted == LABELS))}
    session = strategy.session
    if epochs > 1 or not session.is_chief:
        return accuracy
    return accuracy | {
        "servers": [c.call("store.status") for c in session.connections],
        **counts_of_steps(session),
    }


def counts_of_steps(session):
    stream = session.board("streams")["fit 1/epoch/0"]
    return {
        "finished": stream["finished"],
        "given_up": len(stream["lost"]),
        "next": stream["next"],
    }


def hit_between_servers(kind, number, hit):
    """Call `hit` when only one server has its message of push `number`."""
    send, sent = MessageStream.send, itertools.count()

    def send_or_hit(stream, header, *others):
        is_due = header.get("op") == kind and header["sequence"] == number
        if is_due and next(sent) == 1:
            time.sleep(1)  # Meanwhile the other server takes its message.
            print("is hit now", flush=True)
            hit()
        return send(stream, header, *others)

    MessageStream.send = send_or_hit


class FailAtStep(keras.callbacks.Callback):
    """The task that `FAILING` names raises an error in its own script, or exits."""

    def __init__(self, strategy):
        super().__init__()
        self.fails = strategy.session.name == os.environ["FAILING"]

    def on_train_batch_end(self, batch, logs=None):
        if self.fails and batch >= 3:
            if code := os.environ.get("EXIT_CODE"):
                sys.exit(int(code))
            raise ArithmeticError("a mistake in the script")


HOOKS = {"fail": FailAtStep}


# The tests' side.


class Job(rx.testing.Cluster):
    """A cluster whose tasks can be started again."""

    def __init__(
        self,
        tmp_path,
        program=job,
        *,
        workers=2,
        ps=2,
        env=None,
        deadline_seconds=120,
        **kwargs,
    ):
        self.stop_file = tmp_path / "stop"
        super().__init__(
            program,
            tasks={"worker": workers, "ps": ps},
            env={
                "STOP_FILE": str(self.stop_file),
                "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
                **(env or {}),
            },
            kwargs=kwargs,
            deadline_seconds=deadline_seconds,
        )

    def __enter__(self):
        super().__enter__()
        self.pids = {task.pid for task in self.tasks.values()}
        config = json.loads(self._processes._environments["ps:0"]["TF_CONFIG"])
        self.addresses = config["cluster"]["ps"]
        return self

    def wait_for_step(self, name, number, seconds=45):
        """Wait for a step of the task's present process."""
        task = self.task(name)
        task.wait_for(f"<{task.pid}: step {number}>", timeout_seconds=seconds)

    def wait_for_progress(self, *names, steps=5):
        """Wait until each of the tasks has made `steps` further steps."""
        for name in names:
            task = self.task(name)
            seen = task.output.count(f"<{task.pid}: step ")
            self.wait_for_step(name, seen + steps)

    def kill(self, name):
        self.task(name).kill()
        assert self.task(name).wait(timeout_seconds=10) == -signal.SIGKILL

    def restart(self, name):
        environment = self._processes._environments[name]
        self.pids.add(self._processes.start_again(name, environment).pid)

    def end(self):
        """Have the chief end the training; results when all tasks have ended."""
        self.stop_file.touch()
        return self.ended()

    def ended(self, seconds=30):
        """Results; servers end by themselves."""
        for name in sorted(self.tasks):  # Servers first.
            self.task(name).wait(timeout_seconds=seconds)
        return self.wait()

    def assert_nothing_is_left(self):
        for pid in self.pids:
            assert not Path(f"/proc/{pid}").exists()
        for address in self.addresses:
            host, port = address.rsplit(":", 1)
            with socket.create_server((host, int(port))):
                pass


def all_done(results):
    codes = {name: code for name, code in results.exit_codes.items() if code}
    assert not codes, "\n".join(
        f"--- {n}: {r.exit_code}\n{r.output[-3000:]}" for n, r in results.items()
    )
    return results["worker:0"].value


def check_counts(results, num_gone, most_lost=None):
    """Check that each batch was trained on once, or given up with one of the workers.

    `num_gone` workers were killed or failed. `most_lost` bounds the updates that each
    server has lost; None: no update is lost. Returns what the chief returned.
    """
    found = results["worker:0"].value
    steps, given_up = found["next"], found["given_up"]
    print(f"{steps} batches, {given_up} given up")
    assert "as other workers did" not in results["ps:0"].output
    assert found["finished"] + given_up == steps
    # A worker holds one batch, and the previous batch while its push is in flight.
    assert given_up <= 2 * num_gone
    bounds = most_lost or [0] * len(found["servers"])
    for server, bound in zip(found["servers"], bounds, strict=True):
        assert server["lost"] <= bound
        assert 0 <= steps - server["applied"] <= given_up
    return found


def durable(tmp_path, every_updates=1):
    return {
        "snapshot_dir": str(tmp_path / "snapshots"),
        "snapshot_every_updates": every_updates,
    }


def disturb(cluster, fault, tasks):
    """Kill tasks, which are started again, or stop them for a while."""
    for name in tasks:
        cluster.kill(name) if fault == "kill" else cluster.task(name).stop()
    if fault == "stop":
        time.sleep(STOPPED_SECONDS)
    for name in tasks:
        cluster.restart(name) if fault == "kill" else cluster.task(name).resume()
