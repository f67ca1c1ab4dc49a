"""Batches that the replicas do not divide: loops compute what one device computes.

As in `fit`, such a batch goes to the largest number of replicas that divides it; the
others compute on copies, which do not count. Tolerances are those of sums in another
order, in float32.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops
from tests.conftest import mirrored

import replicax as rx

_RNG = np.random.default_rng(7)
X = _RNG.normal(size=(53, 6)).astype("float32")
Y = _RNG.integers(0, 3, size=53).astype("int32")


def require_close(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        found,
        expected,
    )


def test_state_of_plain_jax_outlives_an_uneven_batch() -> None:
    """A result of `run` is passed with the next batch, which all replicas hold."""

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
                losses.append(float(loss))
        return weights, losses

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
    # Results know which replicas had examples.
    doubled = strategy.run(lambda x: 2 * x, args=(sums,))
    assert doubled.num_active == 3
    mapped = jax.tree.map(lambda x: x + 1, doubled)
    assert mapped.num_active == 3
    both = jax.tree.map(jnp.add, batch, strategy.run(lambda x: x, args=(batch,)))
    assert both.num_active == 3


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit, jax.checkpoint])
def test_a_jitted_function_is_traced_for_each_number_of_replicas(jit: Any) -> None:
    """Both batches have 2 rows a replica; the second is on 3 of the 4 replicas."""
    strategy = mirrored(4)

    @jit
    def mean(x: Any) -> Any:
        return rx.get_replica_context().all_reduce("mean", x.mean())

    batches = strategy.experimental_distribute_dataset(X[:14], batch_size=8)
    means = [strategy.run(lambda x: mean(x), args=(x,)) for x in batches]
    require_close(means, [X[:8].mean(), X[8:14].mean()])


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
    np.testing.assert_allclose(reduced, X[:4].sum(0), rtol=1e-5)
    np.testing.assert_allclose(merged, X[:4].sum(0), rtol=1e-5)


def test_batches_of_other_replicas_are_refused_together() -> None:
    strategy = mirrored(4)
    with pytest.raises(ValueError, match=r"1 in args\[0\], 3 in args\[1\]"):
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
    assert len(batch.values) == 2
