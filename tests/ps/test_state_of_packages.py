"""Layers of packages whose state needs all rows are refused with several workers."""

from typing import Any

import pytest

import replicax.testing

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]


def layers() -> list[Any]:
    """Stand-ins for the layers of HGQ2 and BayesFlow that the tables know."""
    import keras

    def build(layer: Any, _: Any) -> None:
        layer.add_weight(name=layer.name, trainable=False, initializer="zeros")

    kinds = {"hgq.quantizer": "FixedPointQuantizerBase", "bayesflow": "Standardize"}
    return [
        type(name, (keras.Layer,), {"__module__": module, "build": build})(name="i")
        for module, name in kinds.items()
    ]


def built() -> list[str]:
    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    messages = []
    with strategy.scope():
        for layer in layers():
            try:
                layer.build((None, 2))
            except NotImplementedError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("num_workers", [1, 2])
def test_layers(num_workers: int) -> None:
    results = replicax.testing.run(
        built, tasks={"worker": num_workers, "ps": 1}, deadline_seconds=100
    )
    for i in range(num_workers):
        messages: Any = results[f"worker:{i}"].value
        assert len(messages) == (2 if num_workers > 1 else 0)
        for message, name in zip(messages, ("hgq.Fixed", "bayesflow.St"), strict=False):
            assert name in message
            assert "'i/i'" in message
            assert "2 workers" in message
            assert "MultiWorkerMirroredStrategy" in message
