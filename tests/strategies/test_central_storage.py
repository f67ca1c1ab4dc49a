"""`CentralStorageStrategy`: devices, custom loops, refusals, memory and copies."""

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from keras import layers
from tests.strategies.parity import assert_same as assert_same_state
from tests.strategies.parity import (
    batches,
    compiled,
    data,
    functional_step,
    network,
    state,
)

import replicax as rx

COMPUTE = ["cpu:0", "cpu:1"]
# Compute devices, and where the variables live.
PLACES = {
    "outside": (COMPUTE, "cpu:5"),
    "inside": (COMPUTE, "cpu:0"),
    "one": (["cpu:3"], None),
}


def central(place: str = "outside") -> rx.CentralStorageStrategy:
    return rx.CentralStorageStrategy(*PLACES[place])


def both(place: str = "inside") -> list[rx.Strategy]:
    """Mirrored variables, which are the oracle, and stored ones."""
    return [rx.MirroredStrategy(PLACES[place][0]), central(place)]


def values(*variables: Any) -> list[np.ndarray]:
    return [np.asarray(v.value) for v in variables]


def assert_same(actual: Any, expected: Any) -> None:
    # See test_central_storage_fit.py.
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


# Devices.


def test_variables_live_on_the_cpu_by_default() -> None:
    strategy = rx.experimental.CentralStorageStrategy()
    assert strategy.num_replicas_in_sync == len(jax.local_devices()) == 8
    assert repr(strategy).endswith("cpu:7; variables on cpu:0)")
    with strategy.scope():
        w = keras.Variable([1.0, 2.0])
    assert w.value.devices() == {jax.devices("cpu")[0]}


def test_a_single_compute_device_keeps_its_variables() -> None:
    strategy = rx.CentralStorageStrategy(["/cpu:3"])
    assert repr(strategy) == "CentralStorageStrategy(cpu:3; variables on cpu:3)"


def test_devices_are_taken_as_given() -> None:
    strategy = rx.CentralStorageStrategy(["/cpu:5", jax.devices()[1]], "/cpu:2")
    assert repr(strategy) == "CentralStorageStrategy(cpu:5, cpu:1; variables on cpu:2)"
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    for variable in [*model.variables, *optimizer.variables]:
        assert variable.value.devices() == {jax.devices()[2]}, variable.path
        variable.assign(np.zeros(variable.shape))
        assert variable.value.devices() == {jax.devices()[2]}, variable.path


# Loops.


def train(
    strategy: rx.Strategy,
    num_steps: int,
    width: int = 16,
    optimizer: Callable[[], Any] = keras.optimizers.Adam,
) -> tuple[Any, Any]:
    """A model and its optimizer after some steps on one batch."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        pair = network(layers.Dense(width, "relu")), optimizer()
    step = functional_step(*pair)
    (batch,) = batches(strategy, 1)
    for _ in range(num_steps):
        strategy.run(step, batch)
    return pair


# Steps that are refused.


@pytest.fixture
def weight() -> Any:
    """A strategy, a weight and its optimizer."""
    strategy = central()
    with strategy.scope():
        return strategy, keras.Variable(jnp.ones(3), name="w"), keras.optimizers.SGD()


@pytest.mark.parametrize(
    "use",
    [
        lambda w, optimizer: w + 1,
        lambda w, optimizer: w.value,
        lambda w, optimizer: w.assign_add(jnp.ones(3)),
        lambda w, optimizer: w.assign(jnp.ones(3)),
        lambda w, optimizer: optimizer.iterations.value,
        lambda w, optimizer: rx.value_and_grad(lambda: jnp.sum(w.value), [w])(),
    ],
    ids=["add", "value", "assign_add", "assign", "iterations", "gradient"],
)
def test_variables_cannot_be_used_after_apply(weight: Any, use: Any) -> None:
    strategy, w, optimizer = weight

    def step() -> None:
        optimizer.apply([jnp.ones(3)], [w])
        use(w, optimizer)

    with pytest.raises(
        rx.ContextError,
        match=r"^CentralStorageStrategy: variable '(w|.*/iteration)' is used after "
        r"optimizer\.apply in the same step\. .* next step\.",
    ):
        strategy.run(step)
    np.testing.assert_array_equal(w, np.ones(3))


def test_what_a_step_trains_it_does_not_assign(weight: Any) -> None:
    strategy, w, optimizer = weight

    def step() -> None:
        w.assign(w * 2)
        optimizer.apply([jnp.ones(3)], [w])

    with pytest.raises(rx.ContextError, match=r"'w' is assigned in a step with an opt"):
        strategy.run(step)


def test_apply_twice_to_a_variable_is_refused(weight: Any) -> None:
    strategy, w, optimizer = weight

    def step() -> None:
        optimizer.apply([jnp.ones(3)], [w])
        optimizer.apply([jnp.ones(3)], [w])

    with pytest.raises(
        rx.ContextError, match=r"optimizer\.apply is called a second time for .*'w'"
    ):
        strategy.run(step)


def test_apply_twice_to_different_variables(weight: Any) -> None:
    strategy, w, optimizer = weight
    with strategy.scope():
        b = keras.Variable(jnp.ones(2), name="b")
    optimizer.build([w, b])

    def step() -> None:
        optimizer.apply([jnp.ones(3)], [w])
        optimizer.apply([jnp.ones(2)], [b])

    strategy.run(step)
    # Gradients of both replicas are summed; the learning rate is 0.01.
    assert_same(values(w, b), [np.full(3, 0.98), np.full(2, 0.98)])
    assert int(optimizer.iterations) == 2


def test_errors_of_the_optimizer_leave_variables_as_they_were() -> None:
    strategy = central("inside")
    with strategy.scope():
        w, b = keras.Variable(jnp.ones(3)), keras.Variable(jnp.ones(3))
        optimizer, metric = keras.optimizers.SGD(), keras.metrics.Mean()
    optimizer.build([b])

    def step() -> None:
        metric.update_state(1.0)
        optimizer.apply([jnp.ones(3)], [w])

    with pytest.raises(ValueError, match="Unknown variable"):
        strategy.run(step)
    assert_same(values(w, b, *metric.variables), [np.ones(3), np.ones(3), 0, 0])


# Values that are shared, missing, changed in between.


def steps_with_shared_arrays(strategy: rx.Strategy) -> list[np.ndarray]:
    with strategy.scope():
        online, target = keras.Variable(jnp.ones(4)), keras.Variable(jnp.zeros(4))
        counter, other = keras.Variable(jnp.zeros(4)), keras.Variable(jnp.ones(4))
        optimizer = keras.optimizers.SGD(0.1, 0.9)
    target.assign(online.value)
    other.assign(counter.value)

    def step() -> None:
        counter.assign(counter + 1)
        other.assign(other + 2)
        with rx.GradientTape() as tape:
            loss = jnp.sum((online.value - target.value - 1) ** 2)
        optimizer.apply(tape.gradient(loss, [online]), [online])

    for _ in range(3):
        strategy.run(step)
    other.assign(counter.value)
    for _ in range(2):
        strategy.run(step)
    return values(counter, other, online, target, *optimizer.variables)


@pytest.mark.parametrize("place", PLACES)
def test_variables_that_share_an_array(place: str) -> None:
    expected, actual = map(steps_with_shared_arrays, both(place))
    assert_same(actual, expected)
    np.testing.assert_array_equal(actual[:2], [np.full(4, 5.0), np.full(4, 7.0)])


def steps_with_averages(
    strategy: rx.Strategy, overwrite: int | None
) -> list[np.ndarray]:
    with strategy.scope():
        w, unused = keras.Variable(jnp.ones(3)), keras.Variable(jnp.ones(2))
        optimizer = keras.optimizers.SGD(
            0.1, use_ema=True, ema_overwrite_frequency=overwrite
        )
    optimizer.build([w, unused])

    def step() -> None:
        with rx.GradientTape() as tape:
            loss = jnp.sum(jnp.square(w.value - 3))
        optimizer.apply(tape.gradient(loss, [w]), [w])

    for _ in range(3):
        strategy.run(step)
    return values(w, unused, *optimizer.variables)


@pytest.mark.parametrize("overwrite", [None, 2])
def test_weight_averages_of_variables_without_gradient(overwrite: int | None) -> None:
    expected, actual = (steps_with_averages(s, overwrite) for s in both())
    assert_same(actual, expected)


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_values_assigned_between_steps_are_seen(place: str) -> None:
    strategy = central(place)
    with strategy.scope():
        w = keras.Variable(jnp.ones(2))
    double = lambda: 2 * w.value  # noqa: E731

    for value in (1.0, 5.0, 7.0):
        w.assign(jnp.full(2, value))
        for _ in range(2):
            out = strategy.run(double)
            np.testing.assert_array_equal(out, np.full(2, 2 * value))


# Memory and copies.


def bytes_by_device() -> dict[int, int]:
    """Bytes of all live arrays; memory that arrays share counts once."""
    gc.collect()
    buffers = {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    total = dict.fromkeys(range(8), 0)
    for (device, _), size in buffers.items():
        total[device] += size
    return total


def memory_after(strategy: rx.Strategy, train: Callable[[rx.Strategy], Any]) -> Any:
    """Bytes on each device that remain, as multiples of the trained weights'."""
    before = bytes_by_device()
    model, optimizer = train(strategy)
    weights = sum(v.value.nbytes for v in model.trainable_variables)
    for variable in [*model.variables, *optimizer.variables]:
        variable.value.block_until_ready()
    after = bytes_by_device()
    return [(after[d] - before[d]) / weights for d in range(8)]


def after_fit(strategy: rx.Strategy) -> Any:
    with strategy.scope():
        model = compiled(network(layers.Dense(1024)))
    model.fit(*data(), batch_size=24, verbose=0)
    return model, model.optimizer


@pytest.mark.parametrize(
    "train",
    [
        lambda strategy: train(strategy, 3, width=1024),
        pytest.param(after_fit, marks=pytest.mark.slow),
    ],
    ids=["loop", "fit"],
)
def test_state_is_there_once(train: Any) -> None:
    """Weights and Adam's two slots: 3 times the weights, 0.1 for all the rest."""
    mirrored, outside = (memory_after(s, train) for s in both("outside"))
    inside = memory_after(central("inside"), train)
    assert mirrored == pytest.approx([3, 3, 0, 0, 0, 0, 0, 0], abs=0.1)
    assert outside == pytest.approx([0, 0, 0, 0, 0, 3, 0, 0], abs=0.1)
    assert inside == pytest.approx([3, 0, 0, 0, 0, 0, 0, 0], abs=0.1)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy to all compute devices."""
    sizes = []
    put = jax.device_put

    def device_put(x: Any, device: Any = None, **kwargs: Any) -> Any:
        mesh = getattr(device, "mesh", None)
        to_replicas = mesh is not None and mesh.axis_names == ("replica",)
        if to_replicas and device.spec == PartitionSpec():
            sizes.append(sum(a.nbytes for a in jax.tree.leaves(x)))
        return put(x, device, **kwargs)

    monkeypatch.setattr(jax, "device_put", device_put)
    return sizes


def test_only_what_changed_is_copied(digits: Any, copied: list[int]) -> None:
    strategy = central()
    with strategy.scope():
        frozen = layers.Dense(512, trainable=False)
        last = layers.Dense(10)
        model: Any = keras.Sequential([keras.Input((64,)), frozen, last])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    kept, trained = (sum(v.value.nbytes for v in x.weights) for x in (frozen, last))
    model.fit(*(a[:96] for a in digits), batch_size=24, verbose=0)
    copied = [size for size in copied if size]
    assert len(copied) == 4  # One for each step; the slots stay where they are.
    assert copied[0] == pytest.approx(kept + trained, abs=100)
    assert copied[1:] == pytest.approx([trained] * 3, abs=100)


def test_the_host_is_two_steps_ahead_at_most() -> None:
    strategy = central()
    with strategy.scope():
        w, optimizer = keras.Variable(jnp.eye(256)), keras.optimizers.SGD(1e-3)

    def step() -> Any:
        product = jax.lax.fori_loop(0, 300, lambda i, x: jnp.sin(x @ x), w.value)
        optimizer.apply([product], [w])
        return product

    jax.block_until_ready(strategy.run(step))
    results = [strategy.run(step) for _ in range(4)]
    assert results[1].is_ready()
    assert not results[3].is_ready()
    assert not w.value.is_ready()


@pytest.mark.slow
def test_many_steps_without_waiting() -> None:
    """Copies, steps and updates overlap; memory that they share is not mixed up."""
    expected, actual = (
        state(*train(s, 1000, optimizer=lambda: keras.optimizers.SGD(0.01, 0.9)))
        for s in both("inside")
    )
    assert_same_state(actual, expected, rtol=1e-3, atol=1e-4)
