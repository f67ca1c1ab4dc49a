"""Which devices a MirroredStrategy takes."""

import jax
import keras
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


@pytest.mark.parametrize(
    "devices", [[], ["cpu:0", "cpu:0"], ["cpu:99"], "cpu:0", ["x"]]
)
def test_bad_devices_are_refused_by_name(devices) -> None:
    with pytest.raises(rx.DeviceError, match=r"^MirroredStrategy: "):
        rx.MirroredStrategy(devices)
