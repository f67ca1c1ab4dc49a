"""Seed 003, "Model Training Patterns - Distribution Strategy": asynchronous training.

The script of "Asynchronous training" with imports and data changed (384 patients of
scikit-learn's diabetes data, five measurements each), on two workers and a server.
"""

from typing import Any

import grain
import keras
import pytest
from sklearn.datasets import load_diabetes

import replicax as rx
from replicax.testing import run

pytest.importorskip("pyarrow")


def patients(batch_size: int) -> Any:
    """Batches of five measurements and the progression a year later, standardised."""
    data: Any = load_diabetes(return_X_y=True)
    x, y = data[0][:384, [2, 3, 6, 8, 9]], data[1][:384, None]
    x, y = (((a - a.mean(0)) / a.std(0)).astype("float32") for a in (x, y))
    examples = list(zip(x, y, strict=True))
    return grain.MapDataset.source(examples).shuffle(seed=0).batch(batch_size)


def script() -> dict[str, Any]:
    # Not in the source, and the same on all workers: the first weights are the chief's.
    train_dataset = patients(batch_size=32)

    # asynchronous
    async_strategy = rx.ParameterServerStrategy()
    with async_strategy.scope():
        model: Any = keras.Sequential(
            [
                keras.layers.Dense(32, input_shape=(5,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(loss="mse", optimizer="sgd")
        history = model.fit(train_dataset, epochs=2, verbose=0)
        loss = model.evaluate(train_dataset, verbose=0)
    return {
        "losses": [*history.history["loss"], loss],
        "steps": async_strategy.session.steps,
        "updates": int(model.optimizer.iterations),
        "weights": [w.tolist() for w in model.get_weights()],
        "staleness": async_strategy.staleness(),
    }


# `test_blocks.py` runs the same programs, as the command ports them.
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_the_model_is_updated_as_soon_as_a_worker_has_a_gradient() -> None:
    results = run(script, tasks={"worker": 2, "ps": 1}, deadline_seconds=100)
    assert results["ps:0"].exit_code == 0
    first, second = (results[f"worker:{i}"].value for i in range(2))
    # 12 batches in each of 2 epochs, each trained on once, by either worker.
    assert first["steps"] + second["steps"] == 24
    assert first["updates"] == second["updates"] == 24
    counted = {w: sum(h.values()) for w, h in first["staleness"].items()}
    done = {"worker:0": first["steps"], "worker:1": second["steps"]}
    assert counted == {worker: steps for worker, steps in done.items() if steps}
    # What they know at the end is the same.
    assert first["losses"] == second["losses"]
    assert first["weights"] == second["weights"]
    before, after, evaluated = first["losses"]
    assert before > after > evaluated
