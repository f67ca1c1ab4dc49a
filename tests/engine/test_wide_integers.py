"""64-bit integers of which JAX would silently drop bits."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from tests.conftest import mirrored

import replicax as rx

WIDE = np.array([[2**40 + 3], [1], [2], [3]])
NARROW = np.array([[2**31 - 1], [-(2**31)], [0], [3]])


def _fit(strategy: rx.Strategy, ids: np.ndarray) -> None:
    with strategy.scope():
        layers = [keras.Input((1,), dtype="int32"), keras.layers.Rescaling(0.1)]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.predict(ids, batch_size=2, verbose=0)


def _distribute(strategy: rx.Strategy, ids: np.ndarray) -> None:
    list(strategy.experimental_distribute_dataset(ids, batch_size=2))


def _values(strategy: rx.Strategy, ids: np.ndarray) -> None:
    strategy.experimental_distribute_values_from_function(
        lambda context: ids[context.replica_id_in_sync_group]
    )


def _run(strategy: rx.Strategy, ids: np.ndarray) -> None:
    strategy.run(lambda x: x + 1, args=(ids,))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("use", [_fit, _distribute, _values, _run])
def test_values_beyond_32_bits_warn(
    use: Callable[[rx.Strategy, np.ndarray], Any], num_replicas: int
) -> None:
    strategy = mirrored(num_replicas)
    with pytest.warns(UserWarning, match=r"int64.* to 1099511627779.*with int32"):
        use(strategy, WIDE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        use(strategy, NARROW)


def test_with_64_bits_nothing_is_lost() -> None:
    strategy = mirrored(2)
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # `enable_x64` is a setting of this thread, so no other thread may prefetch.
        (batch,) = strategy.experimental_distribute_dataset(
            WIDE, batch_size=4, prefetch=0
        )
        np.testing.assert_array_equal(np.asarray(batch.array).ravel(), WIDE.ravel())
