"""BayesFlow: running mean, variance and count of the whole batch."""

from typing import Any

import keras
import numpy as np
import pytest
from tests.packages.parity import STRATEGIES, require_same

bf: Any = pytest.importorskip(
    "bayesflow", reason="BayesFlow is not installed: make test-packages"
)

pytestmark = [pytest.mark.packages, pytest.mark.filterwarnings("default")]

RNG = np.random.default_rng(0)
THETA = RNG.normal(2.0, 3.0, size=(26, 2)).astype("float32")
DATA = {
    "theta": THETA,
    "x": (THETA[:, None] + RNG.normal(size=(26, 5, 2))).astype("float32"),
}


def fitted(**options: Any) -> keras.Model:
    adapter = (
        bf.Adapter()
        .convert_dtype("float64", "float32")
        .rename("theta", "inference_variables")
        .rename("x", "summary_variables")
    )
    model = bf.ContinuousApproximator(
        adapter=adapter,
        inference_network=bf.networks.CouplingFlow(
            depth=2, permutation=None, subnet_kwargs={"widths": (8,), "dropout": 0.0}
        ),
        summary_network=bf.networks.DeepSet(summary_dim=3, depth=1, dropout=0.0),
        **options,
    )
    model.compile(optimizer=keras.optimizers.SGD(1e-3))
    # Of 26 rows the last batch has two, which fewer replicas hold.
    dataset = bf.OfflineDataset(DATA, batch_size=8, adapter=adapter, shuffle=False)
    model.fit(dataset=dataset, epochs=2, verbose=0)
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_running_statistics(strategy: str) -> None:
    def train() -> keras.Model:
        model = fitted(standardize="all")
        counts = [v for v in model.weights if v.shape == () and not v.trainable]
        # Each epoch sees all rows: 26 of parameters, and 26 times 5 of observations.
        assert {52.0, 260.0} <= {float(np.asarray(v)) for v in counts}
        return model

    require_same(train, strategy)


def test_defaults() -> None:
    require_same(fitted, "mirrored")
