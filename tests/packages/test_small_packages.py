"""SciKeras, KerasRS and keras-tcn under a strategy."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.packages.parity import CPUS, STRATEGIES, require_same

import replicax as rx

pytestmark = [pytest.mark.packages, pytest.mark.filterwarnings("default")]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(26, 8)).astype("float32")
Y = X.sum(1)
FIT: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def test_scikeras() -> None:
    wrappers: Any = pytest.importorskip("scikeras.wrappers")
    selection: Any = pytest.importorskip("sklearn.model_selection")

    def network(rate: float = 0.01) -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(rate), "mse")
        return model

    def found(strategy: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            regressor = wrappers.KerasRegressor(network, random_state=0, **FIT)
            search = selection.GridSearchCV(regressor, {"model__rate": [0.1, 0.01]})
            search.fit(X, Y)
            return search.best_params_, search.cv_results_["mean_test_score"]

    one, four = found(rx.MirroredStrategy(CPUS[:1])), found(rx.MirroredStrategy(CPUS))
    assert one[0] == four[0]
    np.testing.assert_allclose(one[1], four[1], rtol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_keras_rs(strategy: str) -> None:
    rs: Any = pytest.importorskip("keras_rs")

    def train() -> keras.Model:
        inputs = keras.Input((8,))
        x = rs.layers.FeatureCross()(inputs, keras.layers.Dense(8)(inputs))
        dot = rs.layers.DotInteraction()([x, keras.layers.Dense(8)(x)])
        model = keras.Model(inputs, keras.layers.Dense(1)(dot))
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        model.fit(X, Y, **FIT)
        return model

    require_same(train, strategy)


def test_keras_rs_ranking() -> None:
    """A ranking loss compares the scores of one list, which is one row."""
    rs: Any = pytest.importorskip("keras_rs")

    def train() -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        model.compile(
            keras.optimizers.SGD(1e-2),
            rs.losses.PairwiseHingeLoss(),
        )
        model.fit(X, (X > 0).astype("float32"), **FIT)
        return model

    require_same(train, "mirrored")


def test_keras_tcn() -> None:
    tcn: Any = pytest.importorskip("tcn")

    def train() -> keras.Model:
        layer = tcn.TCN(4, kernel_size=2, dilations=(1, 2), use_layer_norm=True)
        model = keras.Sequential([keras.Input((8, 1)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        model.fit(X[..., None], Y, **FIT)
        return model

    require_same(train, "mirrored")
