"""The cross-device operations: equal sums by different collectives."""

import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from tests.conftest import mirrored, values_of

import replicax as rx
from replicax.engine import collectives as collectives_module
from replicax.engine.replica_axis import ReplicaAxis
from replicax.planning.hlo import Groups, replica_groups


def with_ops(num_replicas: int, ops: rx.CrossDeviceOps | None) -> rx.Strategy:
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], ops)


def all_reduce(strategy: rx.Strategy, x: Any, op: str = "sum") -> np.ndarray:
    def fn(x: Any) -> Any:
        return rx.get_replica_context().all_reduce(op, x)

    return np.stack(values_of(strategy.run(fn, (rx.PerReplica(x),))))


def program_text(strategy: rx.Strategy, x: np.ndarray) -> str:
    """The program of `all_reduce` as XLA compiled it."""
    all_reduce(strategy, x)
    (program,) = strategy.runner.programs
    return program.lower([], [x]).compile().as_text() or ""


def collectives(text: str) -> dict[str, Groups]:
    """The kinds of collectives in a program, with the groups that each works in."""
    found = re.findall(
        r"\b(all-reduce|reduce-scatter|all-gather|all-to-all)"
        r"(?:-start)?\((.*)",
        text,
    )
    return {kind: replica_groups(attributes) for kind, attributes in found}


@settings(max_examples=30)
@given(data=st.data())
def test_all_kinds_give_numpys_sum(data) -> None:
    num_replicas = data.draw(st.sampled_from([2, 3, 4, 6, 8]), "num_replicas")
    shape = data.draw(st.lists(st.integers(0, 7), max_size=3).map(tuple), "shape")
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int32"]), "dtype")
    divisors = [k for k in range(1, num_replicas + 1) if num_replicas % k == 0]
    group_size = data.draw(st.sampled_from([None, *divisors]), "group_size")
    ops = data.draw(
        st.sampled_from(
            [
                rx.HierarchicalCopyAllReduce(group_size=group_size),
                rx.NcclAllReduce(),
            ]
        ),
        "ops",
    )
    x = 9 * np.random.default_rng(0).normal(size=(num_replicas, *shape))
    x = np.asarray(jnp.asarray(x, dtype))
    got = all_reduce(with_ops(num_replicas, ops), x)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    # Rounding of one addition each, in units of the dtype's.
    unit = {"float32": 2**-23, "bfloat16": 2**-8, "int32": 0}[dtype]
    terms = x.astype("float64")
    bound = num_replicas * unit * np.abs(terms).sum(0)
    assert (np.abs(got.astype("float64") - terms.sum(0)) <= bound).all()
    # Copies must not differ by as much as rounding.
    np.testing.assert_array_equal(got, np.broadcast_to(got[:1], got.shape))


@pytest.mark.parametrize(
    "ops",
    [
        rx.NcclAllReduce(),
        rx.HierarchicalCopyAllReduce(),
        rx.HierarchicalCopyAllReduce(group_size=2),
        rx.ReductionToOneDevice("cpu:3"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "complex64"])
def test_dtypes_and_operations(ops, dtype) -> None:
    strategy = with_ops(4, ops)
    x = jnp.arange(12, dtype="float32").reshape(4, 3).astype(dtype)
    total, mean = all_reduce(strategy, x), all_reduce(strategy, x, "mean")
    assert total.dtype == dtype
    np.testing.assert_array_equal(total.astype("complex64")[2], [18.0, 22.0, 26.0])
    np.testing.assert_array_equal(mean.astype("complex64")[2], [4.5, 5.5, 6.5])


def test_empty_arrays_and_one_replica() -> None:
    ops = rx.HierarchicalCopyAllReduce()
    empty = all_reduce(with_ops(2, ops), np.zeros((2, 0, 3), "float32"))
    assert empty.shape == (2, 0, 3)
    alone = all_reduce(with_ops(1, ops), np.ones((1, 2), "float32"))
    assert alone.tolist() == [[1, 1]]


def test_compiled_programs_differ() -> None:
    x = np.ones((4, 5), "float32")
    all_four = ((0, 1, 2, 3),)
    assert collectives(program_text(mirrored(4), x)) == {"all-reduce": all_four}
    hierarchical = rx.HierarchicalCopyAllReduce(group_size=2)
    assert collectives(program_text(with_ops(4, hierarchical), x)) == {
        "reduce-scatter": ((0, 1), (2, 3)),
        "all-reduce": ((0, 2), (1, 3)),
        "all-gather": ((0, 1), (2, 3)),
    }


def test_gradients_pass_through_the_chosen_operations() -> None:
    class Doubled(rx.CrossDeviceOps):
        """A user's own: wrong on purpose, to be seen."""

        shapes: list[Any]

        def __init__(self) -> None:
            self.shapes = []

        def sum(self, value: jax.Array, axis: ReplicaAxis) -> jax.Array:
            assert axis.size == 2
            assert axis.devices == ("cpu:0", "cpu:1")
            self.shapes.append(value.shape)
            return 2 * lax.psum(value, axis.name)

    ops = Doubled()
    strategy = with_ops(2, ops)
    with strategy.scope():
        w = keras.Variable([1.0, 1.0])
        optimizer = keras.optimizers.SGD(1.0)

    def step(x: Any) -> None:
        with rx.GradientTape() as tape:
            loss = keras.ops.sum(w * x)
        optimizer.apply(tape.gradient(loss, [w]), [w])

    strategy.run(step, (rx.PerReplica(np.float32([[1, 2], [3, 4]])),))
    np.testing.assert_array_equal(np.asarray(w.value), [1 - 8, 1 - 12])
    assert set(ops.shapes) == {(2,)}
    np.testing.assert_array_equal(all_reduce(strategy, np.float32([1, 2])), [6, 6])
    np.testing.assert_array_equal(
        all_reduce(strategy, np.float32([1, 2]), "mean"), [3, 3]
    )


def test_group_size_must_divide() -> None:
    with pytest.raises(
        ValueError, match=r"group_size=3 does not divide the 4.*\[1, 2, 4\]"
    ):
        all_reduce(
            with_ops(4, rx.HierarchicalCopyAllReduce(group_size=3)), np.ones((4, 1))
        )


def test_reduction_to_one_device_is_an_all_reduce(caplog) -> None:
    collectives_module._log_all_reduce.cache_clear()
    with caplog.at_level(logging.WARNING, "replicax"):
        strategy = with_ops(4, rx.ReductionToOneDevice("/cpu:1"))
        rx.ReductionToOneDevice()
    assert caplog.text.count("summed by XLA's all-reduce") == 1
    x = np.ones((4, 5), "float32")
    assert collectives(program_text(strategy, x)) == {"all-reduce": ((0, 1, 2, 3),)}


def test_reduction_to_one_device_only_adds() -> None:
    with pytest.raises(ValueError, match=r"accumulation_fn=.*max.*rx\.CrossDeviceOps"):
        rx.ReductionToOneDevice("cpu:0", max)


def test_reduce_op_of_strings() -> None:
    assert rx.ReduceOp.of("mean", "test") is rx.ReduceOp.MEAN
    assert rx.ReduceOp.of(rx.ReduceOp.SUM, "test") is rx.ReduceOp.SUM
    with pytest.raises(ValueError, match="test: unknown reduce operation 'max'"):
        rx.ReduceOp.of("max", "test")


# Operations of a user's own.


class Own(rx.CrossDeviceOps):
    """Sums like XLA, then does what a test asks for."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def sum(self, value: jax.Array, axis: ReplicaAxis) -> Any:
        return self.change(lax.psum(value, axis.name))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda x: None, TypeError, r"Own\.sum: returned None of type NoneType"),
        (lambda x: x[:2], ValueError, r"shape \(2,\) .* value of shape \(3,\)"),
        (
            lambda x: x.astype("bfloat16"),
            ValueError,
            r"bfloat16 .* dtype float32",
        ),
    ],
)
def test_what_sum_may_not_return(change, error, match) -> None:
    x = np.ones((2, 3), "float32")
    with pytest.raises(error, match=match):
        all_reduce(with_ops(2, Own(change)), x)
