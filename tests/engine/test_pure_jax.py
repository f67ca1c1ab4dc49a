"""Training without Keras: parameters are pytrees that flow through `run`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import mirrored, values_of

import replicax as rx


class Moments(NamedTuple):
    """Adam's state, of the kind Optax nests."""

    count: Any
    first: Any
    second: Any


class Chain(NamedTuple):
    clip: tuple[()]
    adam: Moments
    nothing: None = None


def start() -> tuple[dict[str, Any], Chain]:
    rng = np.random.default_rng(0)
    params = {
        "hidden": {"w": rng.normal(size=(64, 16)).astype("float32") / 8},
        "out": [rng.normal(size=(16, 10)).astype("float32") / 4, np.zeros(10, "f")],
    }
    zeros = jax.tree.map(np.zeros_like, params)
    return params, Chain((), Moments(np.int32(0), zeros, zeros))


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    h = jax.nn.relu(x @ params["hidden"]["w"])
    logits = h @ params["out"][0] + params["out"][1]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))


def adam(params: Any, state: Chain, grads: Any) -> tuple[Any, Chain]:
    count = state.adam.count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.adam.first, grads)
    second = jax.tree.map(
        lambda v, g: 0.99 * v + 0.01 * g * g, state.adam.second, grads
    )
    params = jax.tree.map(
        lambda p, m, v: (
            p - 0.01 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8)
        ),
        params,
        first,
        second,
    )
    return params, Chain((), Moments(count, first, second))


def replica_step(params: Any, state: Chain, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    context = rx.get_replica_context()
    loss, grads = context.all_reduce(rx.ReduceOp.MEAN, (loss, grads))
    return *adam(params, state, grads), loss


@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_training_equals_plain_jax(num_replicas, digits) -> None:
    strategy = mirrored(num_replicas)
    params, state = start()
    plain_params, plain_state = start()

    @jax.jit
    def plain_step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return *adam(params, state, grads), loss

    for i in range(5):
        x, y = (a[32 * i :][:32] for a in digits)
        batch = strategy.experimental_distribute_values_from_function(
            lambda c, x=x, y=y: (
                x[c.replica_id_in_sync_group :: num_replicas],
                y[c.replica_id_in_sync_group :: num_replicas],
            )
        )
        params, state, loss = strategy.run(replica_step, (params, state, *batch))
        plain_params, plain_state, plain_loss = plain_step(
            plain_params, plain_state, x, y
        )
        np.testing.assert_allclose(values_of(loss)[0], plain_loss, rtol=1e-5)
    assert isinstance(state, Chain)
    assert state.nothing is None
    assert state.adam.count == 5

    def compare(got: jax.Array, want: jax.Array) -> None:
        assert len(got.addressable_shards) == num_replicas
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, want, rtol=1e-4, atol=1e-5)

    jax.tree.map(compare, (params, state.adam), (plain_params, plain_state.adam))
    # Host arrays first, and from then on arrays that lie on all replicas.
    assert len(strategy.runner.programs) == 1


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
