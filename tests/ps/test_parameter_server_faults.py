"""Tasks of a job with parameter servers that are killed, frozen, or fail."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import replicax as rx
import replicax.testing
from replicax.ps.message_stream import MessageStream
from replicax.ps.strategy import ParameterServerStrategy

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess

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


# What the tasks run.


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
    """Says how far this process is; in the chief it ends the training when asked to."""

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


def counts_of(strategy):
    """What the servers and the board have counted, after a single epoch."""
    session = strategy.session
    status = session.board("status")
    stream = status["streams"]["fit 1/epoch/0"]
    groups = [
        group
        for connection in session.connections
        for group in connection.call("store.status")["groups"].values()
    ]
    return {
        "sockets": len(sockets_here()),
        "versions": [group["version"] for group in groups],
        "steps": {n: w["steps"] for n, w in status["workers"].items() if w["steps"]},
        "lost": stream["lost"],
        "next": stream["next"],
        "deaths": {n: w["deaths"] for n, w in status["workers"].items()},
        "starts": {n: w["starts"] for n, w in status["workers"].items()},
    }


def make(options):
    """The strategy of a job; `options["timeouts"]` change those of `TIMEOUTS`."""
    timeouts = rx.Timeouts(**TIMEOUTS | options.get("timeouts", {}))
    return ParameterServerStrategy(**options | {"timeouts": timeouts})


def job(options, epochs=1, hook=None):
    """Train until the test says that it is enough."""
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
        verbose=0,
        callbacks=callbacks,
    )
    found = counts_of(strategy) if strategy.is_chief and epochs == 1 else {}
    accuracy = float(np.mean(model.predict(POINTS, verbose=0).argmax(-1) == LABELS))
    return found | {"accuracy": accuracy}


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


def die_in_push():
    """Have this process killed between a push and its answer."""
    send = MessageStream.send

    def send_and_die(stream, header, *others):
        sent = send(stream, header, *others)
        if header.get("op") == "push" and header["sequence"] == 6:
            print("dies now", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return sent

    MessageStream.send = send_and_die


class DieOrCut(keras.callbacks.Callback):
    """Worker 1 dies once; the chief's sockets are cut again and again."""

    def __init__(self, strategy):
        super().__init__()
        self.session = strategy.session
        cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
        self.ports = {int(address.rsplit(":", 1)[1]) for address in cluster["ps"]}
        self.ended = threading.Event()

    def on_train_begin(self, logs=None):
        if self.session.is_chief:
            threading.Thread(target=self.cut, daemon=True).start()
        elif self.session.starts == 1:
            die_in_push()

    def on_train_end(self, logs=None):
        self.ended.set()

    def cut(self):
        number = 0
        while not self.ended.wait(0.11):
            number += cut_sockets(self.ports)
            print(f"cut {number}", flush=True)


class DieWithAPart(keras.callbacks.Callback):
    """Worker 1 dies when it has the second part of a step and has not brought it."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy
        self.can_die = strategy.session.index == 1
        self.steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        if (
            self.can_die
            and self.steps > 8
            and self.strategy.servers.steps._shares[0].part
        ):
            os.kill(os.getpid(), signal.SIGKILL)


HOOKS = {"fail": FailAtStep, "die or cut": DieOrCut, "die": DieWithAPart}


def sockets_here():
    """The descriptors of this process' sockets."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # It may be closed by now.
            if entry.readlink().name.startswith("socket:"):
                found.append(int(entry.name))
    return found


def cut_sockets(ports):
    """Break this process' connections to those ports; how many there were."""
    number = 0
    for descriptor in sockets_here():
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(descriptor)) as found,
        ):
            if found.getpeername()[1] in ports:
                found.shutdown(socket.SHUT_RDWR)
                number += 1
    return number


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
        """A step of the process that runs now."""
        task = self.task(name)
        task.wait_for(f"<{task.pid}: step {number}>", timeout_seconds=seconds)

    def wait_for_progress(self, *names, steps=5):
        """So many further steps of each of the tasks."""
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


def check_counts(found):
    """Every step was done or lost, and every push applied once or not at all."""
    done, lost = sum(found["steps"].values()), found["lost"]
    assert done + lost == found["next"]
    for version in found["versions"]:
        assert done <= version <= done + lost


@pytest.mark.slow
def test_a_killed_worker_is_not_waited_for_and_may_come_back(tmp_path):
    with Job(tmp_path, options={}) as cluster:
        cluster.wait_for_step("worker:1", 5)
        cluster.kill("worker:1")
        cluster.wait_for_progress("worker:0", steps=10)
        cluster.restart("worker:1")
        cluster.wait_for_step("worker:1", 5)
        results = cluster.end()
        found = all_done(results)
        check_counts(found)
        assert 0 < found["lost"] <= 4
        assert found["starts"] == {"worker:0": 1, "worker:1": 2}
        assert found["steps"]["worker:1"] >= 6
        assert results["worker:1"].value["accuracy"] > 0.9
        assert "worker:1 is back" in results["worker:1"].output
        # The constructor does not return in a server.
        assert "ParameterServerStrategy(" in results["worker:0"].output
        assert "ParameterServerStrategy(" not in results["ps:0"].output
    cluster.assert_nothing_is_left()


@pytest.mark.slow
def test_a_worker_that_is_killed_twice_or_frozen_goes_on(tmp_path):
    options = {"timeouts": {"heartbeat": 2}, "max_staleness": 3}
    with Job(tmp_path, options=options) as cluster:
        for _ in range(2):
            cluster.wait_for_step("worker:1", 5)
            cluster.kill("worker:1")
            cluster.wait_for_progress("worker:0")
            cluster.restart("worker:1")
        cluster.wait_for_step("worker:1", 5)
        frozen = cluster.task("worker:1")
        frozen.stop()
        time.sleep(3)
        cluster.wait_for_progress("worker:0", steps=10)
        frozen.resume()
        cluster.wait_for_progress("worker:1")
        found = all_done(cluster.end())
        check_counts(found)
        assert found["starts"] == {"worker:0": 1, "worker:1": 3}
        assert found["deaths"]["worker:1"] >= 1
        assert found["accuracy"] > 0.9


@pytest.mark.slow
def test_a_worker_that_does_not_come_back_ends_nothing(tmp_path):
    with Job(tmp_path, options={}, epochs=500) as cluster:
        cluster.wait_for_step("worker:1", 25)
        cluster.kill("worker:1")
        cluster.wait_for_progress("worker:0", steps=60)
        results = cluster.end()
    assert results.exit_codes == {
        "worker:0": 0,
        "worker:1": -signal.SIGKILL,
        "ps:0": 0,
        "ps:1": 0,
    }
    assert results["worker:0"].value["accuracy"] > 0.9


def snapshots_in(tmp_path, every_updates=5):
    return {
        "snapshot_dir": str(tmp_path / "snapshots"),
        "snapshot_every_updates": every_updates,
    }


@pytest.mark.slow
def test_a_killed_chief_resumes_the_running_epoch(tmp_path):
    with Job(tmp_path, options={}, epochs=500) as cluster:
        cluster.wait_for_step("worker:0", 25)
        cluster.kill("worker:0")
        cluster.restart("worker:0")
        cluster.wait_for_step("worker:0", 25)
        results = cluster.end()
        found = all_done(results)
        assert found["accuracy"] > 0.9
        assert "worker:0 is back" in results["worker:0"].output
        assert results["worker:1"].value["accuracy"] == found["accuracy"]


@pytest.mark.slow
def test_without_its_chief_a_job_fails_when_the_grace_period_is_over(tmp_path):
    with Job(tmp_path, options={"timeouts": {"chief": 5}}, epochs=500) as cluster:
        cluster.wait_for_step("worker:0", 5)
        cluster.wait_for_step("worker:1", 5)
        cluster.kill("worker:0")
        results = cluster.ended(25)
    assert results.exit_codes == {
        "worker:0": -signal.SIGKILL,
        "worker:1": 138,
        "ps:0": 1,
        "ps:1": 1,
    }
    for name in ("worker:1", "ps:0", "ps:1"):
        assert "worker:0 (the chief) died and did not return" in results[name].output


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("server", [0, 1])
def test_without_snapshots_a_killed_server_ends_the_job(tmp_path, server, restarted):
    options = {"timeouts": {"server": 40 if restarted else 8}}
    with Job(tmp_path, options=options, epochs=500) as cluster:
        cluster.wait_for_step("worker:0", 5)
        cluster.wait_for_step("worker:1", 5)
        cluster.kill(f"ps:{server}")
        if restarted:
            cluster.restart(f"ps:{server}")
        results = cluster.ended(40)
    codes = results.exit_codes
    if not restarted:
        assert codes.pop(f"ps:{server}") == -signal.SIGKILL
    assert codes.pop("worker:0") == codes.pop("worker:1") == 138
    assert set(codes.values()) == {1}, results["ps:0"].output
    advice = "snapshot_dir" if restarted else "See its log"
    for name in ("worker:0", "worker:1"):
        output = results[name].output
        assert f"ps:{server}" in output.splitlines()[-1], output
        assert advice in output, output


@pytest.mark.slow
def test_an_error_in_a_workers_script_ends_only_that_worker(tmp_path):
    env = {"FAILING": "worker:1"}
    with Job(tmp_path, options={}, hook="fail", env=env) as cluster:
        assert cluster.task("worker:1").wait(timeout_seconds=45) == 1
        cluster.wait_for_progress("worker:0", steps=10)
        results = cluster.end()
    assert results.exit_codes == {"worker:0": 0, "worker:1": 1, "ps:0": 0, "ps:1": 0}
    assert results["worker:0"].value["accuracy"] > 0.9
    check_counts(results["worker:0"].value)


@pytest.mark.slow
def test_an_error_in_the_chiefs_script_ends_the_job(tmp_path):
    env = {"FAILING": "worker:0"}
    with Job(tmp_path, options={}, hook="fail", env=env) as cluster:
        results = cluster.ended(45)
    assert results.exit_codes == {"worker:0": 1, "worker:1": 138, "ps:0": 1, "ps:1": 1}
    for name in ("worker:1", "ps:0", "ps:1"):
        assert "ArithmeticError: a mistake in the script" in results[name].output


@pytest.mark.slow
def test_a_push_is_applied_once_or_not_at_all(tmp_path):
    with Job(tmp_path, options={}, hook="die or cut") as cluster:
        cluster.task("worker:1").wait_for("dies now")
        assert cluster.task("worker:1").wait(timeout_seconds=10) == -signal.SIGKILL
        cluster.restart("worker:1")
        cluster.wait_for_step("worker:1", 20)
        results = cluster.end()
        found = all_done(results)
        check_counts(found)
        assert 0 < found["lost"] <= 4
        # Nothing else was lost, though connections broke within messages, and no
        # connection is left of those that were made anew.
        assert found["sockets"] < 20
        assert int(results["worker:0"].output.split("cut ")[-1].split()[0]) > 10
