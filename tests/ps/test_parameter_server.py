"""ParameterServerStrategy: roles, options and errors; bounded staleness; custom loops.

Tests of several tasks share a cluster of two workers and two servers, with bounded
staleness and gradients in bfloat16.
"""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers
from tests.ps.package_layers import build_package_layers

import replicax as rx
import replicax.testing

pytest.importorskip("pyarrow")

CLUSTER = {"worker": ["localhost:1", "localhost:2"], "ps": ["localhost:3"]}


def as_task(monkeypatch, cluster, task_type="worker", index=0):
    task = {"type": task_type, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


def test_both_public_names_are_one_class():
    found = rx.experimental.ParameterServerStrategy
    assert found is rx.ParameterServerStrategy


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (None, "no cluster is described"),
        ("worker", "has no parameter servers"),
        ("ps", "worker"),
    ],
)
def test_clusters_that_lack_tasks_are_refused(monkeypatch, job, message):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if job is not None:
        as_task(monkeypatch, {job: ["localhost:1"]}, job)
    with pytest.raises(rx.ClusterConfigError, match=message):
        rx.ParameterServerStrategy()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"snapshot_dir": "s3://bucket/a"}, "snapshot_dir .* 's3://bucket/a'"),
        ({"overlap": True, "max_staleness": 1}, "overlap=True begins"),
        ({"compression": "float16"}, "None or 'bfloat16'; got 'float16'"),
    ],
)
def test_invalid_options_are_refused(monkeypatch, options, message):
    as_task(monkeypatch, CLUSTER)
    with pytest.raises(ValueError, match=message):
        rx.ParameterServerStrategy(**options)


def test_without_a_token(monkeypatch):
    as_task(monkeypatch, CLUSTER)
    for name in ("REPLICAX_PS_TOKEN", "REPLICAX_PS_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="REPLICAX_PS_TOKEN"):
        rx.ParameterServerStrategy()


def test_unreachable_servers_are_an_error(monkeypatch):
    as_task(monkeypatch, CLUSTER)
    monkeypatch.setenv("REPLICAX_PS_TOKEN", "of-this-test-0123456789")
    with pytest.raises(rx.ClusterError, match="ps:0"):
        rx.ParameterServerStrategy(timeouts=rx.Timeouts(startup=0.5))


def test_an_evaluator_uses_no_servers(monkeypatch):
    as_task(monkeypatch, {**CLUSTER, "evaluator": ["localhost:4"]}, "evaluator")
    strategy = rx.ParameterServerStrategy()
    assert strategy.is_chief
    assert strategy.staleness() == {}
    x, y = np.ones((16, 3), "float32"), np.ones((16, 1), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        model.compile("adam", "mse")
    history = model.fit(x, y, epochs=2, batch_size=8, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]
    assert model.predict(x, verbose=0).shape == (16, 1)
    assert len(model.optimizer.variables) > 4  # It has its slots.


def test_without_pyarrow():
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "import replicax as rx\n"
        "try:\n"
        "    rx.ParameterServerStrategy()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    task = {"type": "worker", "index": 0}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": CLUSTER, "task": task}),
            "REPLICAX_PS_TOKEN": "of-this-test-0123456789",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "replicax[ps]" in ended.stdout, ended


# The cluster.

_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(320, 6)).astype("float32")
Y = np.argmax(X @ _RNG.normal(size=(6, 3)), axis=1).astype("int32")


def classifier(optimizer=None):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    if optimizer is not None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def fitted(strategy, max_staleness, *, overlap=False):
    keras.utils.set_random_seed(1)
    strategy.max_staleness, strategy.servers.overlap = max_staleness, overlap
    before = dict(strategy.session.staleness)
    with strategy.scope():
        model = classifier(keras.optimizers.Adam(0.05))
    history = model.fit(X, Y, batch_size=16, epochs=4, verbose=0)
    seen = {
        k: n - before.get(k, 0)
        for k, n in strategy.session.staleness.items()
        if n > before.get(k, 0)
    }
    return {"accuracy": history.history["accuracy"][-1], "staleness": seen}


def loop(strategy):
    """A custom loop with two optimizers."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(3)])
        optimizers = keras.optimizers.SGD(0.2), keras.optimizers.Adam(0.02)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )

    def step(x, y):
        with rx.GradientTape() as tape:
            losses = loss_fn(y, model(x, training=True))
            loss = rx.compute_average_loss(losses, global_batch_size=16)
        gradients = tape.gradient(loss, model.trainable_variables)
        for optimizer, layer, grads in zip(
            optimizers, model.layers, (gradients[:2], gradients[2:]), strict=True
        ):
            optimizer.apply(grads, layer.trainable_variables)
        return loss, x[:, 0]

    data = strategy.experimental_distribute_dataset((X, Y), batch_size=16)
    losses, firsts = [], []
    for _ in range(3):
        for batch in data:
            loss, first = strategy.run(step, batch)
            losses.append(float(strategy.reduce("sum", loss)))
            firsts.append(np.asarray(strategy.gather(first, 0)))
    return {"losses": losses, "firsts": np.stack(firsts), "length": len(data)}


def changing_variables(strategy):
    with strategy.scope():
        a, b = keras.Variable(1.0), keras.Variable(2.0)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([a, b])
    strategy.run(lambda: optimizer.apply([a.value], [a]))
    try:
        strategy.run(lambda: optimizer.apply([b.value], [b]))
    except NotImplementedError as error:
        return str(error)
    return None


def bounded():
    strategy = rx.ParameterServerStrategy(
        max_staleness=1, compression="bfloat16", timeouts=rx.Timeouts(step=40)
    )
    return {
        "one": fitted(strategy, 1),
        "none": fitted(strategy, 0),
        "overlapping": fitted(strategy, None, overlap=True),
        "unbounded": fitted(strategy, None),
        "loop": loop(strategy),
        "changing": changing_variables(strategy),
        "num_replicas": strategy.num_replicas_in_sync,
        "repr": repr(strategy),
        "layers": build_package_layers(strategy),
    }


@pytest.fixture(scope="module")
def workers():
    results = replicax.testing.run(
        bounded,
        tasks={"worker": 2, "ps": 2},
        logical_devices=1,
        deadline_seconds=150,
    )
    return [results[f"worker:{i}"].value for i in range(2)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "most"), [("one", 1), ("none", 0)])
def test_staleness_is_bounded(workers, name, most):
    for found in workers:
        assert max(found[name]["staleness"]) <= most
        # Both did some steps, and all 80 were made.
        assert sum(found[name]["staleness"].values()) > 0
        assert found[name]["accuracy"] > 0.9
    assert sum(sum(f[name]["staleness"].values()) for f in workers) == 80


@pytest.mark.multiprocess
def test_custom_loops_take_turns_at_batches(workers):
    for found in workers:
        assert found["loop"]["length"] == 10
        losses = found["loop"]["losses"]
        assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    firsts = [found["loop"]["firsts"].reshape(3, 10, 16) for found in workers]
    # In each epoch one worker has the even batches, the other the odd batches.
    batches = np.stack(firsts, axis=2).reshape(3, 320)
    np.testing.assert_array_equal(batches, np.stack([X[:, 0]] * 3))


@pytest.mark.multiprocess
def test_overlapping_steps_lack_their_own_last_update(workers):
    for name in ("overlapping", "unbounded"):
        assert sum(sum(f[name]["staleness"].values()) for f in workers) == 80
    for found in workers:
        # But for the first step of each of four epochs.
        assert found["overlapping"]["staleness"].get(0, 0) <= 4


@pytest.mark.multiprocess
def test_one_optimizer_for_each_set_of_variables(workers):
    assert all("one optimizer for each set" in f["changing"].lower() for f in workers)


@pytest.mark.multiprocess
def test_replicas_of_one_worker_make_an_update(workers):
    assert [found["num_replicas"] for found in workers] == [1, 1]
    assert "worker:1 of 2 workers, 2 servers" in workers[1]["repr"]


@pytest.mark.multiprocess
def test_layers_of_packages_that_need_all_rows_are_refused(workers):
    for found in workers:
        messages = found["layers"]
        for message, name in zip(messages, ("hgq.Fixed", "bayesflow.St"), strict=True):
            for part in (name, "'i/i'", "2 workers", "MultiWorkerMirroredStrategy"):
                assert part in message
