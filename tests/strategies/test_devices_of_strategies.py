"""The devices of `MirroredStrategy` and `OneDeviceStrategy`."""

from typing import Any

import jax
import keras
import numpy as np
import pytest

import replicax as rx


def test_all_devices_by_default() -> None:
    strategy = rx.MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.local_devices()) == 8
    assert repr(strategy).startswith("MirroredStrategy(cpu:0, cpu:1, ")


def test_devices_in_the_order_given() -> None:
    strategy = rx.MirroredStrategy(["/cpu:5", jax.devices()[1]])
    assert repr(strategy) == "MirroredStrategy(cpu:5, cpu:1)"
    with strategy.scope():
        w = keras.Variable([1.0, 2.0])
    assert [s.device.id for s in w.value.addressable_shards] == [5, 1]
    assert w.value.sharding.is_fully_replicated
    w.assign([3.0, 4.0])
    assert len(w.value.devices()) == 2


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


BAD = [[], ["cpu:0", "cpu:0"], "cpu:0", ["x"], ["cpu:99"]]


@pytest.mark.parametrize(
    ("make", "args"),
    [
        *((rx.MirroredStrategy, (x,)) for x in BAD),
        *((rx.CentralStorageStrategy, (x,)) for x in BAD),
        *((rx.CentralStorageStrategy, (None, x)) for x in ("cpu:99", "x", ["cpu:0"])),
        *((rx.OneDeviceStrategy, (x,)) for x in ("cpu:99", "x", None, ["cpu:0"])),
    ],
)
def test_bad_devices_are_refused_by_name(make: Any, args: Any) -> None:
    with pytest.raises(rx.DeviceError, match=rf"^{make.__name__}: "):
        make(*args)
