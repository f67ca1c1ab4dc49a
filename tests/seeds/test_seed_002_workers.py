"""Seed 002, TensorFlow's guide: MultiWorkerMirroredStrategy and `TF_CONFIG`.

The snippets of "Distributed Training in TensorFlow", sections
"MultiWorkerMirroredStrategy" and "Setting up TF_CONFIG environment variable", and the
Keras and loop snippets, which "are the same with other strategies", on two workers.
"""

import json
import os
from typing import Any

import grain
import keras
import numpy as np
import pytest
from tests.seeds.machines import take_machine

import replicax as rx
from replicax.testing import run


def make_strategies() -> tuple[str, dict[str, Any]]:
    """The error of NCCL, and the guide's other strategies, all in one process."""
    workers, index = take_machine()
    # Source: three workers and two parameter servers, "host1:port" and so on.
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    )
    with pytest.raises(rx.DeviceError) as nccl:
        rx.experimental.MultiWorkerMirroredStrategy(
            rx.experimental.CollectiveCommunication.NCCL
        )
    communications = rx.experimental.CollectiveCommunication
    strategies = {
        "default": rx.experimental.MultiWorkerMirroredStrategy(),
        "ring": rx.experimental.MultiWorkerMirroredStrategy(communications.RING),
        "auto": rx.experimental.MultiWorkerMirroredStrategy(communications.AUTO),
    }
    return str(nccl.value), strategies


def keras_losses(multiworker_strategy: Any) -> list[float]:
    """The guide's Keras model, trained on a dataset and on arrays."""
    with multiworker_strategy.scope():
        model: Any = keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])
        model.compile(loss="mse", optimizer="sgd")

    # Source: `tf.data.Dataset.from_tensors(([1.], [1.])).repeat(100).batch(10)`
    example = (np.ones(1, "float32"), np.ones(1, "float32"))
    dataset = grain.MapDataset.source([example]).repeat(100).batch(10)
    losses = model.fit(dataset, epochs=2, verbose=0).history["loss"]
    losses.append(model.evaluate(dataset, verbose=0))

    inputs, targets = np.ones((100, 1)), np.ones((100, 1))
    history = model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)
    multiworker_strategy.check_replicas()
    return [*losses, *history.history["loss"]]


def loop_losses(multiworker_strategy: Any) -> list[float]:
    """The guide's loop, with a squared error, which its one class would make zero."""
    # Compute global batch size using number of replicas.
    BATCH_SIZE_PER_REPLICA = 5
    global_batch_size = (
        BATCH_SIZE_PER_REPLICA * multiworker_strategy.num_replicas_in_sync
    )
    with multiworker_strategy.scope():
        model: Any = keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])
        optimizer = keras.optimizers.SGD(0.1)
    example = (np.ones(1, "float32"), np.ones(1, "float32"))
    dataset = grain.MapDataset.source([example]).repeat(1000).batch(global_batch_size)
    dist_dataset = multiworker_strategy.experimental_distribute_dataset(dataset)

    def step_fn(inputs: Any) -> Any:
        features, labels = inputs
        with rx.GradientTape() as tape:
            error = keras.ops.square(model(features) - labels)
            loss = keras.ops.sum(error) * (1.0 / global_batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    losses = []
    input_iterator = iter(dist_dataset)
    for _ in range(10):
        per_replica_losses = multiworker_strategy.experimental_run_v2(
            step_fn, args=(next(input_iterator),)
        )
        losses.append(
            float(
                multiworker_strategy.reduce(
                    rx.ReduceOp.SUM, per_replica_losses, axis=None
                )
            )
        )
    return losses


def guide() -> dict[str, Any]:
    nccl, strategies = make_strategies()
    return {
        "nccl": nccl,
        "replicas": [s.num_replicas_in_sync for s in strategies.values()],
        "keras": keras_losses(strategies["default"]),
        "loop": loop_losses(strategies["ring"]),
    }


# `test_blocks.py` runs the same programs, as the command ports them.
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_the_guides_snippets_on_two_workers() -> None:
    results = run(guide, num_workers=2, deadline_seconds=100)
    first, second = results.returned.values()
    assert first == second
    assert first["replicas"] == [2, 2, 2]
    assert (
        "CollectiveCommunication.NCCL needs GPUs, but the devices are cpu. Use AUTO"
        in (first["nccl"])
    )
    # Printed by the guide: 0.3670, 0.1622 and 0.1007, then 0.0717 and 0.0317. Where
    # training starts is random; by how much an epoch shrinks the loss is not.
    before, after, evaluated, third, fourth = first["keras"]
    assert after / before == pytest.approx(0.1622 / 0.3670, rel=1e-3)
    assert evaluated / after == pytest.approx(0.1007 / 0.1622, rel=1e-3)
    assert fourth / third == pytest.approx(0.0317 / 0.0717, rel=2e-3)
    # Each step shortens the error by 1 - 2 * 0.1 * 2 = 0.6, so squares it to 0.36.
    np.testing.assert_allclose(
        first["loop"], first["loop"][0] * 0.36 ** np.arange(10), rtol=1e-3, atol=1e-12
    )


def guide_config(port: str) -> str:
    return json.dumps(
        {
            "cluster": {
                "worker": [f"host1:{port}", f"host2:{port}", f"host3:{port}"],
                "ps": [f"host4:{port}", f"host5:{port}"],
            },
            "task": {"type": "worker", "index": 1},
        }
    )


def test_tf_config_as_printed_says_what_to_fill_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_CONFIG", guide_config("port"))
    with pytest.raises(rx.ClusterConfigError) as caught:
        rx.experimental.MultiWorkerMirroredStrategy()
    assert "address 'host1:port' of worker:0" in str(caught.value)
    assert "its port 'port' is not a number from 1 to 65535" in str(caught.value)


def test_parameter_servers_belong_to_their_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_CONFIG", guide_config("2222"))
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    cluster = resolver.cluster_spec()
    assert (cluster.num_tasks("worker"), cluster.num_tasks("ps")) == (3, 2)
    assert resolver.master() == "host2:2222"
    with pytest.raises(
        rx.ClusterConfigError, match="parameter servers, job 'ps', which only"
    ):
        rx.experimental.MultiWorkerMirroredStrategy()
