"""OneDeviceStrategy keeps to its device."""

import jax
import keras
import numpy as np
import pytest

import replicax as rx


def test_everything_is_on_the_device() -> None:
    strategy = rx.OneDeviceStrategy("/cpu:6")
    assert repr(strategy) == "OneDeviceStrategy(cpu:6)"
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        w = keras.Variable([1.0, 2.0])
    assert w.value.devices() == {jax.devices()[6]}

    def step(x: jax.Array) -> jax.Array:
        w.assign_add(x)
        return rx.get_replica_context().all_reduce("sum", w.value)

    out = strategy.run(step, (np.float32([1, 1]),))
    assert out.devices() == w.value.devices() == {jax.devices()[6]}
    np.testing.assert_array_equal(out, [2.0, 3.0])
    np.testing.assert_array_equal(strategy.reduce("sum", out), [2.0, 3.0])
    np.testing.assert_array_equal(strategy.gather(out, 0), [2.0, 3.0])


def test_a_jax_device_will_do() -> None:
    assert repr(rx.OneDeviceStrategy(jax.devices()[2])) == "OneDeviceStrategy(cpu:2)"


@pytest.mark.parametrize("device", ["cpu:99", "x", None, ["cpu:0"]])
def test_bad_devices_are_refused_by_name(device) -> None:
    with pytest.raises(rx.DeviceError, match=r"^OneDeviceStrategy: "):
        rx.OneDeviceStrategy(device)
