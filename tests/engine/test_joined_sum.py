"""Small arrays, which CPU replicas sum as one joined array."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.engine.collectives import ReplicaAxis, joined_sum

SMALL = 2**18 // 4  # float32 elements


def axis_of(*devices: str) -> ReplicaAxis:
    return ReplicaAxis(name="replica", devices=devices, num_per_host=len(devices))


def both_ways(arrays: list[Any], axis: ReplicaAxis) -> tuple[list[Any], list[Any], str]:
    """The joined sums, JAX's separate sums, and the program of the joined sums."""
    mesh = Mesh(np.array(jax.devices()[: axis.size]), ("replica",))

    def spread(fn):
        return jax.jit(
            jax.shard_map(
                lambda arrays: fn([x[0] for x in arrays]),
                mesh=mesh,
                in_specs=P("replica"),
                out_specs=P(),
                check_vma=False,
            )
        )

    joined = spread(lambda own: joined_sum(own, axis, "replica"))
    apart = spread(lambda own: jax.lax.psum(own, "replica"))
    return joined(arrays), apart(arrays), joined.lower(arrays).as_text()


def messages(text: str) -> int:
    """Arrays that are summed in a program before XLA has optimised it."""
    return len(re.findall(r"stablehlo\.all_reduce", text))


@settings(max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=6),
    dtypes=st.lists(st.sampled_from(["float32", "int32", "bfloat16"]), min_size=6),
)
def test_sums_are_those_of_jax(shapes, dtypes) -> None:
    """Joining changes no element's order of additions: sums are equal bit by bit."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.integers(-9, 9, (2, *shape)), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=False)
    ]
    got, expected, _ = both_ways(arrays, axis_of("cpu:0", "cpu:1"))
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def test_small_arrays_of_one_dtype_are_one_message() -> None:
    arrays = [
        np.ones((2, *shape), "float32") for shape in [(3, 4), (), (5,), (SMALL + 1,)]
    ]
    arrays += [np.ones((2, 7), "int32"), np.ones((2, 0), "float32")]
    got, expected, text = both_ways(arrays, axis_of("cpu:0", "cpu:1"))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    # The three small ones, the large one, the integers and the empty one.
    assert messages(text) == 4


def test_joined_arrays_of_one_size_are_copied_by_one_kernel() -> None:
    shapes = [(3, 4), (12,), (6, 2), (2, 6)]
    arrays = [np.full((2, *shape), 3, "float32") for shape in shapes]
    got, expected, text = both_ways(arrays, axis_of("cpu:0", "cpu:1"))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    # JAX drops the last copy's end, which makes it another function.
    assert len(re.findall(r"stablehlo\.dynamic_slice", text)) == 2


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_arrays_are_not_joined_on_other_devices(name) -> None:
    arrays = [np.ones((2, 3), "float32")] * 3
    _, _, text = both_ways(arrays, axis_of(f"{name}:0", f"worker/1/{name}:0"))
    assert messages(text) == 3


def test_arrays_of_replicas_on_several_devices_are_not_joined() -> None:
    """These arrays may be sharded, and joining would gather them."""
    assert not axis_of("cpu:0+cpu:1", "cpu:2+cpu:3").joined_bytes
    assert axis_of("worker/0/cpu:0", "worker/1/cpu:0").joined_bytes > (
        axis_of("cpu:0", "cpu:1").joined_bytes
    )


def test_a_step_of_many_small_layers_sends_two_messages() -> None:
    """One of the gradients, one of the moving statistics and metrics."""
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        layers = [
            layer
            for _ in range(4)
            for layer in (keras.layers.Dense(6), keras.layers.BatchNormalization())
        ]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        def loss_fn():
            return keras.ops.mean(model(x, training=True) ** 2) / 2

        _, grads = rx.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)

    batch = rx.PerReplica(np.ones((2, 2, 4), "float32"))
    strategy.run(step, (batch,))
    (program,) = strategy.runner.programs
    values = [v.value for v in program.inputs]
    text = program.lower(values, [batch.array]).as_text()
    assert messages(text) == 2
