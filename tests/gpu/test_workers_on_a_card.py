"""Workers whose processes use the card of this machine.

This module asks JAX for no device: tasks import it before they join their cluster.
"""

import os
from collections.abc import Callable

import jax
import keras
import numpy as np
import pytest
from keras import layers
from tests.strategies import parity

import replicax as rx
from replicax.testing import run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

ON_THE_CARD = {
    "JAX_PLATFORMS": "cuda,cpu",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
}

# As NCCL 2.28 and JAX 0.11.2 word it on an H100.
REFUSED = (
    "INTERNAL: NCCL operation ncclCommInitRankConfig(...) failed: invalid usage (run "
    "with NCCL_DEBUG=WARN for details). Last NCCL warning(error) log entry (may be "
    "unrelated) 'Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60'."
)


def refused_by_nccl() -> None:
    rx.MultiWorkerMirroredStrategy()
    raise jax.errors.JaxRuntimeError(REFUSED)


def sums_over_workers() -> float:
    strategy = rx.MultiWorkerMirroredStrategy()
    return float(strategy.reduce("sum", strategy.run(lambda: jax.numpy.ones(()))))


def assert_says_so(program: Callable[[], object], env: dict[str, str]) -> None:
    """All end for good, with an exit code after which nobody restarts them."""
    results = run(program, num_workers=2, check=False, env=env, deadline_seconds=100)
    assert {result.exit_code for result in results.values()} == {1}
    text = "".join(result.output for result in results.values())
    assert "Duplicate GPU detected" in text


def require_card() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("there is no GPU")


def test_the_error_of_two_workers_on_one_card() -> None:
    assert_says_so(refused_by_nccl, {})


def test_two_workers_on_one_card() -> None:
    require_card()
    assert_says_so(sums_over_workers, ON_THE_CARD)


def fitted_by_servers() -> list[float]:
    """Losses of a worker whose variables are on a parameter server."""
    jax.config.update("jax_default_matmul_precision", "highest")
    assert jax.default_backend() == os.environ["EXPECTED_BACKEND"]

    def model() -> keras.Model:
        hidden = layers.Dense(32, activation="relu"), layers.BatchNormalization()
        return parity.compiled(parity.network(*hidden), keras.optimizers.SGD(0.05))

    _, found = parity.fitted(rx.ParameterServerStrategy(), model, epochs=2)
    return found["history"]["loss"]


def test_a_worker_of_parameter_servers() -> None:
    pytest.importorskip("pyarrow")
    require_card()
    losses = []
    for backend, env in (("gpu", ON_THE_CARD), ("cpu", {"JAX_PLATFORMS": "cpu"})):
        results = run(
            fitted_by_servers,
            tasks={"worker": 1, "ps": 1},
            env={**env, "EXPECTED_BACKEND": backend},
            deadline_seconds=120,
        )
        losses.append(results["worker:0"].value)
    np.testing.assert_allclose(*losses, rtol=1e-4)
