import json
from typing import Any

import keras
import numpy as np
import pytest
from keras.optimizers.schedules import CosineDecay, ExponentialDecay

from replicax.keras.schedules import LinearScalingWarmup


def rates(schedule, steps):
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize(
    ("replicas", "warmup_steps", "expected"),
    [
        (2, 4, [0.1, 0.125, 0.15, 0.175, 0.2, 0.2]),
        (8, 0, [0.8] * 3),
        (1, 3, [0.1] * 5),
    ],
)
def test_ramp_then_constant(replicas, warmup_steps, expected):
    schedule = LinearScalingWarmup(0.1, replicas, warmup_steps)
    got = rates(schedule, range(len(expected)))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_after_starts_at_the_end_of_the_warm_up(warmup_steps):
    after = ExponentialDecay(0.1, decay_steps=10, decay_rate=0.5)
    schedule = LinearScalingWarmup(0.1, 4, warmup_steps, after)
    got = rates(schedule, range(warmup_steps, warmup_steps + 20))
    expected = [4 * rate for rate in rates(after, range(20))]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    ramp = rates(schedule, range(warmup_steps))
    assert ramp == sorted(ramp)


@pytest.mark.parametrize("after", [None, CosineDecay(0.1, 100)])
def test_round_trip_through_json(after):
    schedule = LinearScalingWarmup(0.1, 4, 10, after)
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(schedule)))
    again = keras.saving.deserialize_keras_object(config)
    assert isinstance(again, LinearScalingWarmup)
    assert again.get_config() == schedule.get_config()
    steps = [0, 5, 10, 60, 200]
    assert rates(again, steps) == rates(schedule, steps)


def test_in_a_compiled_and_saved_model(tmp_path):
    schedule = LinearScalingWarmup(0.01, 4, 3, CosineDecay(0.01, 10))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    make_optimizer: Any = keras.optimizers.SGD
    model.compile(make_optimizer(schedule), "mse")
    x = np.ones((32, 2), np.float32)
    fit: Any = model.fit
    fit(x, x[:, :1], batch_size=8, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    again: Any = keras.saving.load_model(tmp_path / "model.keras")
    for trained in (model, again):
        rate = float(trained.optimizer.learning_rate)
        np.testing.assert_allclose(rate, float(schedule(4)), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1, 2), "learning_rate=-0.1"),
        ((float("nan"), 2), "learning_rate=nan"),
        ((0.1, 0), "num_replicas=0"),
        ((0.1, 2, -1), "warmup_steps=-1"),
    ],
)
def test_numbers_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        LinearScalingWarmup(*arguments)
