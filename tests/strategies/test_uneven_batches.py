"""Batches that the replicas do not divide: loops compute what one device computes.

As in `fit`, such a batch goes to the largest number of replicas that divides it; what
the others compute on copies counts for nothing. Tolerances are those of sums in another
order, in float32.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, ops

import replicax as rx

_RNG = np.random.default_rng(7)
X = _RNG.normal(size=(53, 6)).astype("float32")
Y = _RNG.integers(0, 3, size=53).astype("int32")


def devices(number: int) -> list[str]:
    return [f"cpu:{i}" for i in range(number)]


STRATEGIES: dict[str, Callable[[], Any]] = {
    "one device": lambda: rx.OneDeviceStrategy("cpu:0"),
    "2 replicas": lambda: rx.MirroredStrategy(devices(2)),
    "3 replicas": lambda: rx.MirroredStrategy(devices(3)),
    "4 replicas": lambda: rx.MirroredStrategy(devices(4)),
    "2 on each of 2": lambda: rx.MirroredStrategy(devices(2), replicas_per_device=2),
    "shard_update": lambda: rx.MirroredStrategy(devices(3), shard_update=True),
    "fully sharded": lambda: rx.FullyShardedStrategy(devices(3)),
    "central storage": lambda: rx.CentralStorageStrategy(devices(3)),
    "one worker": lambda: rx.MultiWorkerMirroredStrategy(),
}
several = pytest.mark.parametrize("name", [n for n in STRATEGIES if n != "one device"])


def mirrored(number: int) -> Any:
    return rx.MirroredStrategy(devices(number))


def require_close(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        found,
        expected,
    )


def trained(strategy: Any, size: int, epochs: int = 2) -> dict[str, Any]:
    """A loop of one's own in batches of `size`, the last one smaller."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(512, "tanh"), layers.Dense(3)]
        )
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        mean_loss = keras.metrics.Mean()
    example_loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def step(x: Any, y: Any) -> Any:
        with rx.GradientTape() as tape:
            logits = model(x, training=True)
            losses = example_loss(y, logits)
            loss = rx.compute_average_loss(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        mean_loss.update_state(losses)
        return loss, losses, logits

    batches = strategy.experimental_distribute_dataset((X, Y), batch_size=size)
    found: dict[str, Any] = {"loss": [], "sum": [], "logits": [], "local": []}
    for _ in range(epochs):
        for batch in batches:
            loss, losses, logits = strategy.run(step, args=batch)
            found["loss"].append(strategy.reduce("sum", loss))
            found["sum"].append(strategy.reduce("sum", losses, axis=0))
            found["mean"] = strategy.reduce("mean", losses, axis=0)
            found["logits"].append(strategy.gather(logits, axis=0))
            found["local"] += strategy.experimental_local_results(losses)
    found["local"] = np.concatenate(found["local"])
    found["logits"] = np.concatenate(found["logits"])
    found["accuracy"], found["mean loss"] = accuracy.result(), mean_loss.result()
    return found | {"weights": model.get_weights(), "slots": slots(optimizer)}


def slots(optimizer: Any) -> list[np.ndarray]:
    return [np.asarray(v) for v in optimizer.variables]


@pytest.mark.slow(but=["8-2 replicas", "5-shard_update"])
@several
@pytest.mark.parametrize("size", [5, 8])  # The last batch has 3 rows, or 5.
def test_loops_are_those_of_one_device(name: str, size: int) -> None:
    found = trained(STRATEGIES[name](), size)
    assert len(found["logits"]) == len(found["local"]) == 2 * len(X)
    require_close(found, trained_on_one_device(size))


@functools.cache
def trained_on_one_device(size: int) -> dict[str, Any]:
    return trained(STRATEGIES["one device"](), size)


@pytest.mark.slow(but=["fully sharded", "one worker"])
@several
def test_fit_takes_them(name: str) -> None:
    require_close(fitted(STRATEGIES[name](), distributes=True), fitted_as_arrays())


def fitted(strategy: Any, *, distributes: bool) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    if distributes:
        data = strategy.experimental_distribute_dataset((X, Y), batch_size=9)
        history = model.fit(data, epochs=2, verbose=0)
        rest = model.evaluate(data, verbose=0), model.predict(data, verbose=0)
    else:
        history = model.fit(X, Y, 9, epochs=2, shuffle=False, verbose=0)
        rest = model.evaluate(X, Y, 9, verbose=0), model.predict(X, 9, verbose=0)
    return model.get_weights(), history.history, rest


@functools.cache
def fitted_as_arrays() -> Any:
    return fitted(STRATEGIES["one device"](), distributes=False)


def test_state_of_plain_jax_outlives_an_uneven_batch() -> None:
    """What `run` returned is passed with the next batch, which all replicas hold."""

    def step(weights: Any, x: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            scores = jax.nn.log_softmax(x @ weights)
            return -jnp.take_along_axis(scores, y[:, None], axis=1).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        value, grads = rx.get_replica_context().all_reduce("mean", (value, grads))
        return weights - 0.5 * grads, value

    def trained(strategy: Any) -> tuple[Any, list[float]]:
        weights, losses = np.zeros((6, 3), "float32"), []
        batches = strategy.experimental_distribute_dataset((X, Y), batch_size=8)
        for _ in range(3):
            for batch in batches:
                weights, loss = strategy.run(step, args=(weights, *batch))
                losses.append(float(loss.values[0]))
        return weights.values[0], losses

    require_close(trained(mirrored(4)), trained(mirrored(1)))


def uneven(strategy: Any, rows: int) -> Any:
    return next(iter(strategy.experimental_distribute_dataset(X[:rows], batch_size=60)))


def test_values_leave_copies_out() -> None:
    strategy = mirrored(4)
    batch = uneven(strategy, 6)
    assert (batch.num_active, batch.array.shape) == (3, (4, 2, 6))
    assert len(batch.values) == len(strategy.experimental_local_results(batch)) == 3
    np.testing.assert_array_equal(np.asarray(batch).reshape(6, 6), X[:6])
    assert "num_active=3" in repr(batch)
    sums = strategy.run(ops.sum, args=(batch,))
    assert sums.num_active == 3
    np.testing.assert_allclose(strategy.reduce("sum", sums), X[:6].sum(), rtol=1e-5)
    np.testing.assert_allclose(
        strategy.reduce("mean", sums), X[:6].sum() / 3, rtol=1e-5
    )
    # Without the batch, what was made of it says who had examples.
    doubled = strategy.run(lambda x: 2 * x, args=(sums,))
    assert doubled.num_active == 3
    mapped = jax.tree.map(lambda x: x + 1, doubled)
    assert mapped.num_active == 3
    both = jax.tree.map(jnp.add, batch, strategy.run(lambda x: x, args=(batch,)))
    assert both.is_batch


def test_variables_and_the_context_leave_them_out() -> None:
    strategy = mirrored(3)
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False, aggregation="sum")
        mean = keras.Variable(0.0, trainable=False, aggregation="mean")

    def step(x: Any) -> Any:
        context = rx.get_replica_context()
        total.assign_add(ops.sum(x))
        mean.assign(ops.mean(x))
        merged = context.merge_call(
            lambda strategy, x: strategy.reduce("sum", x, axis=0), args=(x,)
        )
        return context.all_reduce("sum", ops.sum(x, axis=0)), merged

    reduced, merged = strategy.run(step, args=(uneven(strategy, 4),))
    np.testing.assert_allclose(total.numpy(), X[:4].sum(), rtol=1e-5)
    np.testing.assert_allclose(mean.numpy(), X[:4].mean(), rtol=1e-5)
    np.testing.assert_allclose(reduced.values[0], X[:4].sum(0), rtol=1e-5)
    np.testing.assert_allclose(merged.values[0], X[:4].sum(0), rtol=1e-5)


def test_batches_of_other_replicas_are_refused_together() -> None:
    strategy = mirrored(4)
    with pytest.raises(ValueError, match=r"Strategy\.run: got values of batches that"):
        strategy.run(ops.add, args=(uneven(strategy, 5), uneven(strategy, 6)))
    with pytest.raises(ValueError, match="different numbers of replicas"):
        strategy.run(ops.add, args=(uneven(strategy, 5), uneven(strategy, 8)))


def sizes(*numbers: int) -> Callable[[rx.InputContext], Iterator[np.ndarray]]:
    ends = np.cumsum(numbers)
    return lambda _: iter(np.split(X[: ends[-1]], ends[:-1]))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ((4, 4, 4, 4, 4), (2, (3, 4, 6))),  # Two batches are left, for two replicas.
        ((4, 4, 4, 4, 2), (3, (3, 2, 6))),  # Six rows are left, divided anew.
        ((4, 4, 4, 1), (1, (3, 1, 6))),
    ],
)
def test_batches_of_a_function(made: Any, expected: Any) -> None:
    strategy = mirrored(3)
    steps = list(strategy.distribute_datasets_from_function(sizes(*made)))
    last = steps[-1]
    assert (last.num_active or 3, last.array.shape) == expected
    rows = np.concatenate([strategy.gather(step, axis=0) for step in steps])
    np.testing.assert_array_equal(rows, X[: sum(made)])


def test_sparse_rows() -> None:
    from jax.experimental import sparse

    strategy = mirrored(3)
    data = sparse.BCOO.fromdense(np.where(X[:4] > 0, X[:4], 0))
    (batch,) = strategy.experimental_distribute_dataset(iter([data]))
    sums = strategy.run(lambda x: x.todense().sum(0), args=(batch,))
    assert sums.num_active == 2
    dense = np.maximum(X[:4], 0)
    require_close(strategy.reduce("sum", sums), dense.sum(0))
    require_close(
        strategy.reduce("sum", batch).todense(), dense.reshape(2, 2, 6).sum(0)
    )
    assert len(batch.values) == 2
