"""Tasks of a job with parameter servers that are killed, frozen, or fail."""

import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from tests.ps.jobs import (
    BATCH_SIZE,
    LABELS,
    POINTS,
    Job,
    Watched,
    all_done,
    check_counts,
    make,
    network,
)

import replicax as rx
import replicax.testing

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]


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
    check_counts(results, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "code", "error"),
    [
        ({}, 1, "ArithmeticError: a mistake in the script"),
        ({"EXIT_CODE": "3"}, 3, "worker:0 (the chief) failed: SystemExit: 3"),
    ],
)
def test_an_error_or_exit_in_the_chiefs_script_ends_the_job(tmp_path, env, code, error):
    env = {"FAILING": "worker:0", **env}
    with Job(tmp_path, options={}, hook="fail", env=env) as cluster:
        results = cluster.ended(45)
    assert results.exit_codes == {
        "worker:0": code,
        "worker:1": 138,
        "ps:0": 1,
        "ps:1": 1,
    }
    for name in ("worker:1", "ps:0", "ps:1"):
        assert error in results[name].output


def leave_early(options):
    """The chief's script ends, and the others still wait for its value of a key."""
    strategy = make(options)
    if not strategy.is_chief:
        strategy.session.get("a word", "its word")


@pytest.mark.slow
def test_a_chief_whose_script_has_ended_is_not_waited_for(tmp_path):
    options = {"timeouts": {"step": 600}}
    with Job(tmp_path, leave_early, options=options) as cluster:
        results = cluster.ended(45)
    assert results.exit_codes == {"worker:0": 0, "worker:1": 138, "ps:0": 0, "ps:1": 0}
    assert "has ended its script, and did not come to its word" in (
        results["worker:1"].output
    )


def train_later(options):
    """Join, and train when the test has killed a server."""
    strategy = make(options)
    print("has joined", flush=True)
    while not Path(os.environ["STOP_FILE"]).exists():
        time.sleep(0.05)
    with strategy.scope():
        model = network()
    model.fit(POINTS, LABELS, batch_size=BATCH_SIZE, epochs=3, verbose=0)
    predicted = model.predict(POINTS, verbose=0).argmax(-1)
    return float(np.mean(predicted == LABELS))


@pytest.mark.slow
def test_a_server_that_has_no_values_yet_may_be_lost_without_snapshots(tmp_path):
    with Job(tmp_path, train_later, options={}) as cluster:
        for name in ("worker:0", "worker:1"):
            cluster.task(name).wait_for("has joined")
        for name in ("ps:0", "ps:1"):
            cluster.kill(name)
            cluster.restart(name)
        results = cluster.end()
    assert all_done(results) > 0.9


def model_of_rows():
    """A model whose dense variables are all on one server, and rows on both."""
    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            rx.layers.Embedding(8, 4, name="rows"),
            keras.layers.GlobalAveragePooling1D(),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


def train_dense_or_rows(options, rows):
    strategy = make(options)
    with strategy.scope():
        model = model_of_rows() if rows else network()
    x = POINTS.astype("int32") % 8 if rows else POINTS
    model.fit(
        x,
        LABELS,
        batch_size=BATCH_SIZE,
        epochs=50,
        verbose=0,
        callbacks=[Watched(strategy)],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "rows"), [("ps:0", False), ("ps:1", False), ("ps:1", True)]
)
def test_a_restarted_chief_names_a_server_that_lost_its_values(tmp_path, server, rows):
    with Job(
        tmp_path, train_dense_or_rows, workers=1, options={}, rows=rows
    ) as cluster:
        cluster.wait_for_step("worker:0", 5)
        for name in ("worker:0", server):
            cluster.kill(name)
        for name in (server, "worker:0"):
            cluster.restart(name)
        code = cluster.task("worker:0").wait(timeout_seconds=60)
        output = cluster.task("worker:0").output
        assert code == 138, output
        assert f"{server} has lost its values" in output.splitlines()[-1], output
        assert cluster.task(server).wait(timeout_seconds=60) != -signal.SIGKILL


def train_on_other_lengths():
    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=30))
    x = np.ones((64 if strategy.is_chief else 48, 2), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    except rx.ClusterMismatchError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_another_number_of_batches_than_the_chiefs():
    results = replicax.testing.run(
        train_on_other_lengths,
        tasks={"worker": 2, "ps": 1},
        logical_devices=1,
        deadline_seconds=100,
    )
    # The other worker ends; the chief continues without it.
    assert results["worker:0"].value is None
    error = results["worker:1"].value
    assert "an epoch of fit 1 has 6 batches, and the chief's has 8" in error
    assert "Pass the same data" in error
