"""A worker is killed when one server has its part of a step, and the other has not."""

import itertools
import os
import signal
import time

import keras
import numpy as np
import pytest
from tests.ps.test_parameter_server_faults import (
    BATCH_SIZE,
    LABELS,
    POINTS,
    Job,
    Watched,
    all_done,
    make,
    network,
)

import replicax as rx
from replicax.ps.message_stream import MessageStream

pytest.importorskip("pyarrow")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]

EPOCHS = 2
STEPS = EPOCHS * len(LABELS) // BATCH_SIZE
WORDS = (np.abs(POINTS) * 20).astype("int32") % 50


def words_network():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            rx.layers.Embedding(50, 4, seed=1),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def die_between(kind):
    """Have this process killed between two messages of its 6th push of a kind."""
    send, sent = MessageStream.send, itertools.count()

    def send_or_die(stream, header, *others):
        is_due = header.get("op") == kind and header["sequence"] == 6
        if is_due and next(sent) == 1:
            time.sleep(1)  # Meanwhile the other server takes its message.
            print("dies now", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return send(stream, header, *others)

    MessageStream.send = send_or_die


def hold_between(kind):
    """Hold the second message of this process's 6th push of a kind for a while."""
    send, sent = MessageStream.send, itertools.count()

    def send_late(stream, header, *others):
        is_due = header.get("op") == kind and header["sequence"] == 6
        if is_due and next(sent) == 1:
            print("holds now", flush=True)
            time.sleep(4)
        return send(stream, header, *others)

    MessageStream.send = send_late


def in_step(options, kind=None, words=False, holds=False):
    """Train in step with the others; the outputs, and what servers have counted."""
    strategy = make(options | {"sync": True})
    session = strategy.session
    with strategy.scope():
        model = words_network() if words else network()
    if kind is not None and session.index == 1 and session.starts == 1:
        (hold_between if holds else die_between)(kind)
    model.fit(
        WORDS if words else POINTS,
        LABELS,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[Watched(strategy)],
    )
    session.barrier("all have trained")
    return {
        "outputs": model.predict(WORDS if words else POINTS, verbose=0),
        "servers": [c.call("store.status") for c in session.connections],
    }


def undisturbed_outputs(tmp_path, words):
    with Job(tmp_path / "1", in_step, options={}, words=words) as cluster:
        return all_done(cluster.ended(60))["outputs"]


def assert_as_undisturbed(results, expected):
    """Each step was made once, and the model is that of an undisturbed run."""
    found = all_done(results)
    for server in found["servers"]:
        assert (server["applied"], server["lost"]) == (STEPS, 0)
    # The sum of two parts is the same in any order.
    np.testing.assert_array_equal(found["outputs"], expected)


@pytest.mark.parametrize(
    ("kind", "words"), [("push", False), ("push", True), ("push_rows", True)]
)
def test_its_part_is_computed_again_from_the_values_of_its_step(tmp_path, kind, words):
    expected = undisturbed_outputs(tmp_path, words)
    with Job(tmp_path / "2", in_step, options={}, kind=kind, words=words) as cluster:
        cluster.task("worker:1").wait_for("dies now")
        assert cluster.task("worker:1").wait(timeout_seconds=10) == -signal.SIGKILL
        cluster.restart("worker:1")
        results = cluster.ended(60)
    assert_as_undisturbed(results, expected)
    assert "computed from newer ones" not in results["worker:1"].output


@pytest.mark.parametrize(
    ("kind", "words"), [("push", False), ("push", True), ("push_rows", True)]
)
def test_also_where_the_whole_job_is_killed_then(tmp_path, kind, words):
    durable = {"snapshot_dir": str(tmp_path), "snapshot_every_updates": 1}
    expected = undisturbed_outputs(tmp_path, words)
    job = {"options": durable, "kind": kind, "words": words}
    with Job(tmp_path / "2", in_step, **job) as cluster:
        cluster.task("worker:1").wait_for("dies now")
        assert cluster.task("worker:1").wait(timeout_seconds=10) == -signal.SIGKILL
        others = ("worker:0", "ps:0", "ps:1")
        for name in others:
            cluster.kill(name)
        for name in (*others, "worker:1"):
            cluster.restart(name)
        results = cluster.ended(90)
    assert_as_undisturbed(results, expected)
    for name in ("worker:0", "worker:1"):
        assert "computed from newer ones" not in results[name].output


@pytest.mark.parametrize(("kind", "words"), [("push", False), ("push_rows", True)])
def test_a_killed_server_gets_again_what_it_has_of_a_step(tmp_path, kind, words):
    """Of the part that one worker has brought, while another's is on its way."""
    durable = {"snapshot_dir": str(tmp_path), "snapshot_every_updates": 1}
    expected = undisturbed_outputs(tmp_path, words)
    job = {"options": durable, "kind": kind, "words": words, "holds": True}
    with Job(tmp_path / "2", in_step, **job) as cluster:
        cluster.task("worker:1").wait_for("holds now")
        time.sleep(1)  # The other worker's parts come.
        for name in ("ps:0", "ps:1"):
            cluster.kill(name)
        for name in ("ps:0", "ps:1"):
            cluster.restart(name)
        results = cluster.ended(90)
    assert_as_undisturbed(results, expected)
    for name in ("ps:0", "ps:1"):
        assert "were lost" not in results[name].output
