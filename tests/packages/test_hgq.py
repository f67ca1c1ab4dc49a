"""HGQ2: bits of quantizers that follow the largest value of the whole batch."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.packages.parity import require_same

import replicax as rx

pytest.importorskip("hgq", reason="HGQ2 is not installed: make test-packages")
from hgq.config import LayerConfigScope, QuantizerConfigScope
from hgq.layers import QBatchNormalization, QDense

pytestmark = [pytest.mark.packages, pytest.mark.filterwarnings("default")]

RNG = np.random.default_rng(0)
# Rows of other sizes: their replicas would choose other numbers of bits.
X = (RNG.normal(size=(26, 8)) * np.geomspace(0.1, 30, 26)[:, None]).astype("float32")
Y = X.sum(1, keepdims=True)


def fitted(*layers: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("q_type", ["kif", "kbi"])
@pytest.mark.parametrize("strategy", ["mirrored", "several on a device"])
def test_dense_layers_with_defaults(strategy: str, q_type: str) -> None:
    def train() -> keras.Model:
        with (
            QuantizerConfigScope(place="datalane", default_q_type=q_type),
            LayerConfigScope(enable_ebops=True, beta0=1e-6),
        ):
            model = fitted(QDense(16, activation="relu"), QDense(1))
        bits = [v for v in model.weights if v.path.endswith("/i") and not v.trainable]
        assert bits
        assert np.asarray(bits[0]).max() > 3  # Of the largest rows.
        return model

    require_same(train, strategy)


def test_batch_normalization_inside() -> None:
    def train() -> keras.Model:
        norm = QBatchNormalization()
        norm.synchronized = rx.has_strategy()
        return fitted(QDense(16), norm, QDense(1))

    require_same(train, "mirrored")
