"""KerasTuner: searches whose trials train under a strategy."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx

keras_tuner: Any = pytest.importorskip(
    "keras_tuner", reason="KerasTuner is not installed: make test-packages"
)

pytestmark = [pytest.mark.packages, pytest.mark.filterwarnings("default")]

CPUS = [f"cpu:{number}" for number in range(4)]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def build(hp: Any) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(hp.Int("units", 2, 8, step=2))]
    )
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.SGD(hp.Choice("rate", [0.01, 0.1])), "mse")
    return model


@pytest.mark.parametrize("kind", ["RandomSearch", "Hyperband", "GridSearch"])
def test_a_search_finds_what_one_device_finds(kind: str, tmp_path: Path) -> None:
    def best(strategy: Any, folder: Path) -> tuple[dict[str, Any], Any]:
        keras.utils.set_random_seed(0)
        counts = {} if kind == "Hyperband" else {"max_trials": 3}
        tuner = getattr(keras_tuner, kind)(
            build,
            objective="val_loss",
            seed=3,
            directory=folder,
            distribution_strategy=strategy,
            **counts,
            **({"max_epochs": 3} if kind == "Hyperband" else {}),
        )
        callbacks = [rx.callbacks.TensorBoard(folder / "logs")] if strategy else []
        options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
        tuner.search(X, Y, validation_data=(X, Y), callbacks=callbacks, **options)
        (trial,) = tuner.oracle.get_best_trials(1)
        (model,) = tuner.get_best_models(1)
        loss = model.evaluate(X, Y, verbose=0)
        return trial.hyperparameters.values, (trial.score, loss)

    want, scores = best(None, tmp_path / "one")
    got, found = best(rx.MirroredStrategy(CPUS), tmp_path / "four")
    assert got == want
    np.testing.assert_allclose(found, scores, rtol=1e-5)
    assert list((tmp_path / "four" / "logs" / "train").iterdir())
