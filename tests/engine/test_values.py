"""`PerReplica`: conversions, pytree, repr, and errors when used as an array."""

import operator

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import mirrored, values_of

import replicax as rx


def test_numpy_conversion() -> None:
    value = mirrored(2).run(lambda x: x * 2, (rx.PerReplica(np.float32([[1], [2]])),))
    array = np.asarray(value)
    assert array.dtype == "float32"
    np.testing.assert_array_equal(array, [[2.0], [4.0]])
    assert np.array(value, dtype="int64").dtype == "int64"
    assert np.mean(value) == 3.0


def test_values_of_host_and_replicated_arrays() -> None:
    assert rx.PerReplica(np.array([1.0, 2.0])).values == (1.0, 2.0)
    assert [float(v) for v in rx.PerReplica(jnp.array([1.0, 2.0])).values] == [1.0, 2.0]
    whole = jax.device_put(np.array([1, 2]), mirrored(2).group.mirrored)
    assert [int(v) for v in rx.PerReplica(whole).values] == [1, 2]


def test_values_keep_the_order_of_the_replicas() -> None:
    strategy = rx.MirroredStrategy(["cpu:3", "cpu:1", "cpu:2"])
    out = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    assert [int(v) for v in out.values] == [0, 1, 2]
    assert [v.devices() for v in out.values] == [{jax.devices()[i]} for i in (3, 1, 2)]


def test_only_one_value_becomes_a_number() -> None:
    one = rx.PerReplica(np.float32([2.5]))
    assert (float(one), int(one)) == (2.5, 2)
    for convert in (float, int):
        name = rf"value\.__{convert.__name__}__"
        with pytest.raises(TypeError, match=f"{name}: a PerReplica of 2 values"):
            convert(rx.PerReplica(np.ones(2)))


def test_repr() -> None:
    small = rx.PerReplica(np.int32([[1], [2]]))
    assert repr(small) == (
        "PerReplica(num_replicas=2, shape=(1,), dtype=int32, values=[[1], [2]])"
    )
    large = rx.PerReplica(jnp.zeros((2, 3, 4), "bfloat16"))
    assert repr(large) == "PerReplica(num_replicas=2, shape=(3, 4), dtype=bfloat16)"
    seen = []
    jax.jit(lambda x: seen.append(repr(rx.PerReplica(x))))(jnp.ones(2))
    assert seen == ["PerReplica(num_replicas=2, shape=(), dtype=float32)"]


def test_pytree() -> None:
    value = {"a": [rx.PerReplica(np.arange(2))], "b": None}
    assert [leaf.tolist() for leaf in jax.tree.leaves(value)] == [[0, 1]]
    doubled = jax.tree.map(lambda x: x * 2, value)
    assert isinstance(doubled["a"][0], rx.PerReplica)
    assert doubled["a"][0].values == (0, 2)
    jitted = jax.jit(lambda v: v)(value)
    assert isinstance(jitted["a"][0], rx.PerReplica)
    jax.block_until_ready(jitted)


ONES = np.ones((2, 3), "float32")

AS_AN_ARRAY = {
    "jnp.asarray": jnp.asarray,
    "jnp.sum": jnp.sum,
    "jnp.add": lambda x: jnp.add(x, 1),
    "keras.ops.sum": keras.ops.sum,
    "keras.ops.convert_to_tensor": keras.ops.convert_to_tensor,
    "layer": lambda x: keras.layers.Dense(2)(x),
    "loss": lambda x: keras.losses.MeanSquaredError()(x, x),
    "metric": lambda x: keras.metrics.Mean().update_state(x),
    "assign": lambda x: keras.Variable(ONES).assign(x),
    "np.add": lambda x: np.add(x, 1),
    "array * value": lambda x: ONES * x,
    "jax array * value": lambda x: jnp.ones((2, 3)) * x,
    "value + 1": lambda x: x + 1,
    "1 - value": lambda x: 1 - x,
    "-value": operator.neg,
    "value @ array": lambda x: x @ ONES.T,
    "value < 1": lambda x: x < 1,
    "value == 1": lambda x: x == 1,
    "value != array": lambda x: x != ONES,
    "value[0]": lambda x: x[0],
    "len": len,
    "iteration": list,
    "in": lambda x: 1 in x,
    "round": round,
    "bool": bool,
    "index": lambda x: [1, 2][x],
    "format": lambda x: f"{x:.3f}",
    "complex": complex,
}


@pytest.mark.parametrize("use", AS_AN_ARRAY.values(), ids=AS_AN_ARRAY.keys())
def test_use_as_an_array_raises_an_error_with_the_remedy(use) -> None:
    value = rx.PerReplica(jnp.ones((2, 2, 3)))
    with pytest.raises(TypeError, match=r"strategy\.(run|reduce).*values\[i\]"):
        use(value)


@pytest.mark.parametrize("use", AS_AN_ARRAY.values(), ids=AS_AN_ARRAY.keys())
def test_the_value_of_one_replica_is_used_as_an_array(use) -> None:
    def outcome(value: object) -> object:
        keras.utils.set_random_seed(0)
        try:
            return use(value)
        except (TypeError, ValueError) as error:  # Only some arrays are numbers.
            return str(error)

    value = rx.PerReplica(jnp.ones((1, 2, 3)))
    jax.tree.map(
        np.testing.assert_array_equal, outcome(value), outcome(jnp.ones((2, 3)))
    )


def test_the_number_of_one_replica_is_used_as_a_number() -> None:
    value = mirrored(1).run(lambda: jnp.float32(2.5))
    total = 0.0
    total += value
    assert (float(total), float(value), int(value), bool(value)) == (2.5, 2.5, 2, True)
    assert (f"{value:.2f}", "%.2f" % value, complex(value)) == ("2.50", "2.50", 2.5)  # noqa: UP031
    assert value > 2
    assert value == 2.5
    assert value != 2
    assert divmod(value, 2) == (1, 0.5)
    assert [3, 4][mirrored(1).run(lambda: jnp.int32(1))] == 4


@pytest.mark.parametrize("name", ["shape", "dtype", "ndim", "size", "T"])
def test_the_value_of_one_replica_has_the_attributes_of_arrays(name) -> None:
    value = rx.PerReplica(ONES[None])
    np.testing.assert_array_equal(getattr(value, name), getattr(ONES, name))
    assert np.asarray(value).shape == (2, 3)
    assert not hasattr(value, "shap")


@pytest.mark.parametrize("name", ["shape", "dtype", "numpy", "item", "mean", "T"])
def test_attributes_of_arrays_raise_an_error_with_the_remedy(name) -> None:
    value = rx.PerReplica(ONES)
    assert not hasattr(value, name)
    with pytest.raises(AttributeError, match=rf"value\.{name}.*strategy\.run"):
        getattr(value, name)
    with pytest.raises(AttributeError, match="no attribute 'shap'"):
        value.shap  # noqa: B018


def test_identity_is_no_comparison() -> None:
    value, other = rx.PerReplica(ONES), rx.PerReplica(ONES)
    assert value == value
    assert value != "text"
    assert value in [None, value]
    with pytest.raises(TypeError, match="`==`"):
        _ = value == other
    assert {value: 1}[value] == 1


STRATEGIES = {
    "mirrored": lambda: mirrored(2),
    "central storage": lambda: rx.CentralStorageStrategy(["cpu:1", "cpu:2"]),
    "fully sharded": lambda: rx.FullyShardedStrategy(["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_models_are_called_with_one_value(make) -> None:
    strategy = make()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        loss, metric = keras.losses.MeanSquaredError(), keras.metrics.Mean()
    (batch,) = strategy.experimental_distribute_dataset(
        np.arange(12, dtype="float32").reshape(4, 3), batch_size=4
    )
    with pytest.raises(TypeError, match=r"PerReplica of \d values.*strategy\.run"):
        model(batch)
    # Outside a replica function, JAX uses the variable's copy on the value's device.
    out = [np.asarray(model(value)) for value in batch.values]
    inside = strategy.run(model, (batch,))
    np.testing.assert_allclose(out, np.asarray(inside), rtol=1e-5)
    first, last = inside.values[0], inside.values[-1]
    expected = np.mean((out[0] - out[-1]) ** 2)
    assert float(loss(first, last)) == pytest.approx(expected)
    metric.update_state(model(batch.values[-1]) - first)
    assert float(metric.result()) == pytest.approx(np.mean(out[-1] - out[0]), rel=1e-4)


def test_values_mix_with_arrays_on_other_devices() -> None:
    value = mirrored(3).run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    first, second, third = value.values
    assert int(first + second * third) == 2
    there = jax.device_put(jnp.ones(()), jax.devices()[5])
    assert (third + there).devices() == {jax.devices()[5]}


@settings(max_examples=10)
@given(
    num_replicas=st.sampled_from([1, 2, 3, 5, 8]),
    rows=st.integers(1, 4),
    columns=st.integers(0, 5),
)
def test_any_shape_survives_the_round_trip(num_replicas, rows, columns) -> None:
    strategy = mirrored(num_replicas)
    x = np.random.default_rng(0).normal(size=(num_replicas, rows, columns))
    x = x.astype("float32")
    out = strategy.run(
        lambda t: {"same": t["x"], "neg": [-t["x"]]}, ({"x": rx.PerReplica(x)},)
    )
    np.testing.assert_array_equal(np.stack(values_of(out["same"])), x)
    np.testing.assert_array_equal(np.stack(values_of(out["neg"][0])), -x)
    summed = strategy.reduce("sum", out)
    np.testing.assert_allclose(summed["same"], x.sum(0), rtol=1e-5, atol=1e-6)
    assert strategy.gather(out, axis=0)["same"].shape == (num_replicas * rows, columns)
