"""Seed 004, "Distributed Deep Learning in TensorFlow": MultiWorkerMirroredStrategy.

The script of the section of that name with imports and data changed, on two workers.
"""

import json
import os
from typing import Any

import numpy as np
import pytest
from tests.seeds.machines import take_machine
from tests.seeds.resnet import create_resnet_model, datasets

import replicax as rx
from replicax.testing import run


def script() -> dict[str, Any]:
    train_dataset, val_dataset = datasets()

    # Define the strategy and worker configurations
    # Source: `['192.168.1.100', '192.168.1.101']`, and 'index': 0
    worker_ip_addresses, index = take_machine()
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": worker_ip_addresses},
            "task": {"type": "worker", "index": index},
        }
    )
    # Instantiate the MultiWorkerMirroredStrategy
    strategy = rx.experimental.MultiWorkerMirroredStrategy()
    # Create the ResNet model and compile it within the strategy scope
    with strategy.scope():
        input_shape = (32, 32, 3)  # Source: (224, 224, 3)
        num_classes = 10
        resnet_model: Any = create_resnet_model(input_shape, num_classes)
        resnet_model.compile(
            optimizer="adam", loss="categorical_crossentropy", metrics=["accuracy"]
        )
    # Train the ResNet model using the strategy. Source: `epochs=10`
    history = resnet_model.fit(
        train_dataset, epochs=3, validation_data=val_dataset, verbose=0
    )
    # Batch normalization included: each replica's statistics, averaged.
    strategy.check_replicas()
    return {"replicas": strategy.num_replicas_in_sync, **history.history}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_train_the_resnet() -> None:
    results = run(script, num_workers=2, deadline_seconds=280)
    first, second = results.returned.values()
    assert first == second
    assert first["replicas"] == 2
    assert first["loss"][-1] < 0.8 * first["loss"][0]
    assert np.isfinite(first["val_loss"]).all()


def test_the_texts_addresses_lack_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_ip_addresses = ["192.168.1.100", "192.168.1.101"]
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps(
            {
                "cluster": {"worker": worker_ip_addresses},
                "task": {"type": "worker", "index": 0},
            }
        ),
    )
    with pytest.raises(rx.ClusterConfigError) as caught:
        rx.experimental.MultiWorkerMirroredStrategy()
    assert caught.value.problem == (
        "address '192.168.1.100' of worker:0: it has no port; expected an address such "
        "as 'host1:2222' or '[fd00::1]:2222'"
    )
