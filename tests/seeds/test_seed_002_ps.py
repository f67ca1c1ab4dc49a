"""Seed 002, TensorFlow's guide: ParameterServerStrategy and its `TF_CONFIG`.

The snippets of "Distributed Training in TensorFlow", sections "ParameterServerStrategy"
and "Setting up TF_CONFIG environment variable", and the Keras snippet, whose "only
things that need to change" is the strategy, on two workers and a server.
"""

import json
import os
from typing import Any

import grain
import keras
import numpy as np
import pytest

import replicax as rx
from replicax.testing import run

pytest.importorskip("pyarrow")


def guide() -> dict[str, Any]:
    """What a worker returns; servers end in the strategy."""
    given = json.loads(os.environ.pop("TF_CONFIG"))
    # Source: three workers and two servers, "host1:port" and so on, and worker 1.
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {
                "worker": given["cluster"]["worker"],
                "ps": given["cluster"]["ps"],
            },
            "task": {"type": given["task"]["type"], "index": given["task"]["index"]},
        }
    )
    ps_strategy = rx.experimental.ParameterServerStrategy()
    print("This is a worker.")
    with ps_strategy.scope():
        model: Any = keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])
        model.compile(loss="mse", optimizer="sgd")

    # Source: `tf.data.Dataset.from_tensors(([1.], [1.])).repeat(100).batch(10)`
    example = (np.ones(1, "float32"), np.ones(1, "float32"))
    dataset = grain.MapDataset.source([example]).repeat(100).batch(10)
    model.fit(dataset, epochs=2, verbose=0)
    evaluated = model.evaluate(dataset, verbose=0)

    inputs, targets = np.ones((100, 1)), np.ones((100, 1))
    model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)
    return {
        "evaluated": evaluated,
        "finally": model.evaluate(dataset, verbose=0),
        "updates": int(model.optimizer.iterations),
        "steps": ps_strategy.session.steps,
        "weights": [w.tolist() for w in model.get_weights()],
    }


# `test_blocks.py` runs the same programs, as the command ports them.
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_the_guides_snippets_on_two_workers_and_a_server() -> None:
    results = run(guide, tasks={"worker": 2, "ps": 1}, deadline_seconds=100)
    first, second = (results[f"worker:{i}"].value for i in range(2))
    assert results["ps:0"].exit_code == 0
    assert "This is a worker." not in results["ps:0"].output
    # Two epochs of ten steps, twice: "the model parameters" are one set for all.
    assert first["updates"] == second["updates"] == 40
    assert first["steps"] + second["steps"] == 40
    assert first["weights"] == second["weights"]
    assert first["evaluated"] == second["evaluated"]
    # A step that is alone shortens the error to 1 - 2 * 0.01 * 2 = 0.96 of it. Stale
    # gradients are of an older, larger error, so that it shrinks a little faster.
    assert first["finally"] < 1.01 * 0.96 ** (2 * 20) * first["evaluated"]
