"""Scopes: nesting, threads and errors."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import keras
import numpy as np
import pytest
from tests.conftest import mirrored, values_of

import replicax as rx
from replicax.engine.scope import current_context, current_strategy


def test_functions_that_query_the_scope() -> None:
    strategy = mirrored(2)
    default = rx.get_strategy()
    assert default is rx.get_strategy()
    assert default.num_replicas_in_sync == 1
    assert (rx.has_strategy(), rx.in_cross_replica_context()) == (False, False)
    with strategy.scope() as entered:
        assert entered is strategy is rx.get_strategy()
        assert (rx.has_strategy(), rx.in_cross_replica_context()) == (True, True)
        assert not rx.get_replica_context()

        def fn() -> Any:
            assert (rx.has_strategy(), rx.in_cross_replica_context()) == (True, False)
            assert rx.get_strategy() is strategy
            assert rx.get_replica_context()
            return 0.0

        strategy.run(fn)
    assert rx.get_strategy() is default
    assert not rx.has_strategy()


def test_scope_is_reentrant_and_reusable() -> None:
    strategy = mirrored(2)
    scope = strategy.scope()
    for _ in range(2):
        with scope, scope, strategy.scope():
            assert rx.get_strategy() is strategy
        assert not rx.has_strategy()


def test_run_outside_the_scope_opens_it() -> None:
    strategy = mirrored(2)

    def fn() -> Any:
        assert rx.get_strategy() is strategy
        return 1.0

    assert values_of(strategy.run(fn)) == (1.0, 1.0)
    assert not rx.has_strategy()


def test_another_strategy_inside_is_refused() -> None:
    two, three = mirrored(2), mirrored(3)
    message = (
        r"MirroredStrategy\(cpu:0, cpu:1, cpu:2\)\.scope: already inside the scope"
    )
    with two.scope():
        with pytest.raises(rx.ContextError, match=message), three.scope():
            pass
        with pytest.raises(rx.ContextError, match=message):
            three.run(lambda: 1.0)
        assert rx.get_strategy() is two
    with three.scope():
        assert rx.get_strategy() is three


def test_errors_leave_no_scope_open() -> None:
    strategy = mirrored(2)
    with pytest.raises(KeyError, match="outside"), strategy.scope(), strategy.scope():
        raise KeyError("outside")
    assert current_strategy() is None

    def fails() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        strategy.run(fails)
    assert current_strategy() is None
    assert current_context() is None

    def fails_in_merge() -> None:
        rx.get_replica_context().merge_call(lambda strategy: fails())

    with pytest.raises(KeyError, match="inside"):
        strategy.run(fails_in_merge)
    assert current_context() is None


def test_new_threads_start_outside() -> None:
    with mirrored(2).scope(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(rx.has_strategy).result() is False


def test_two_threads_train_with_different_strategies_at_once() -> None:
    barrier = threading.Barrier(2, timeout=60)

    def train(devices: list[str]) -> float:
        strategy = rx.MirroredStrategy(devices)
        barrier.wait()
        with strategy.scope():
            w = keras.Variable(1.0)
            barrier.wait()

            def step(x: Any) -> Any:
                assert rx.get_strategy() is strategy
                with rx.GradientTape() as tape:
                    loss = w * x
                grad = tape.gradient(loss, w)
                w.assign_sub(rx.get_replica_context().all_reduce("sum", grad))
                return w.value

            x = rx.PerReplica(np.full(len(devices), 0.5, "float32"))
            for _ in range(20):
                strategy.run(step, (x,))
        assert [d.id for d in sorted(w.value.devices(), key=lambda d: d.id)] == [
            int(d[-1]) for d in devices
        ]
        return float(w.value)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(train, ["cpu:0", "cpu:1"])
        other = pool.submit(train, ["cpu:4", "cpu:5", "cpu:6", "cpu:7"])
        assert (one.result(), other.result()) == (-19.0, -39.0)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("run", lambda s: s.run(lambda: 1.0)),
        ("reduce", lambda s: s.reduce("sum", 1.0)),
        ("gather", lambda s: s.gather(np.ones(1), 0)),
    ],
)
def test_cross_replica_calls_inside_a_replica_function_are_refused(name, call) -> None:
    strategy = mirrored(2)
    with pytest.raises(
        rx.ContextError, match=rf"Strategy\.{name}: called inside a replica function"
    ):
        strategy.run(lambda: call(strategy))


def test_run_inside_a_transformation_is_refused() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        w = keras.Variable(1.0)

    for call in (
        lambda: jax.jit(lambda x: strategy.run(lambda x: x, (x,)).array)(1.0),
        lambda: jax.jit(lambda: strategy.run(w.assign_add, (1.0,)))(),
        lambda: jax.grad(lambda x: strategy.run(lambda x: x, (x,)).array.sum())(1.0),
        # The gradient would be zero: `run` reads the variable itself.
        lambda: rx.value_and_grad(lambda: strategy.run(lambda: w * w), [w])(),
    ):
        for _ in range(2):
            with pytest.raises(rx.ContextError, match=r"a JAX transf.*jax\.jit"):
                call()
            strategy.run(w.assign_add, (1.0,))  # The next call finds its program.
    assert float(w.value) == 9.0


def test_run_in_a_merge_call_is_refused_while_a_tape_records() -> None:
    def step() -> None:
        with rx.GradientTape():
            rx.get_replica_context().merge_call(lambda s: s.run(lambda: 1.0))

    with pytest.raises(rx.ContextError, match=r"merge_call.*call fn directly"):
        mirrored(2).run(step)


def test_variables_from_outside_the_scope_are_refused() -> None:
    two, other = mirrored(2), mirrored(2)
    outside = keras.Variable(1.0, name="outside")
    with other.scope():
        foreign = keras.Variable(1.0, name="foreign")
    with rx.MirroredStrategy(["cpu:4", "cpu:5"]).scope():
        elsewhere = keras.Variable(1.0, name="elsewhere")

    with pytest.raises(
        rx.ContextError,
        match=r"variable 'outside' was created outside the scope of Mirr",
    ):
        two.run(lambda: outside * 1.0)
    with pytest.raises(
        rx.ContextError,
        match=r"variable 'elsewhere' was created in the scope of another",
    ):
        two.run(lambda: elsewhere * 1.0)
    # The same devices hold the same copies.
    assert values_of(two.run(lambda: foreign * 2.0)) == (2.0, 2.0)
