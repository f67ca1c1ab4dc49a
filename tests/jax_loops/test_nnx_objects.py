"""Flax NNX objects among the arguments of `run`; `flax_cases` has whole steps."""

import copy
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import replicax as rx


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 32, rngs=rngs)
        self.last = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


def test_sharing_is_kept() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones((2, 2)))

    class Pair(nnx.Module):
        def __init__(self, tied: Tied) -> None:
            self.a, self.b = tied, tied

    tied = Tied()
    pair = Pair(tied)

    def double(pair: Pair, other: Tied) -> jax.Array:
        assert pair.a.weight is other.weight
        other.weight[...] = 2 * other.weight
        return pair.b.weight.sum()

    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    assert float(strategy.run(double, args=(pair, tied))) == 8
    assert pair.a is tied
    assert pair.b is tied
    np.testing.assert_array_equal(tied.weight[...], 2 * np.ones((2, 2)))


def test_each_replica_draws_from_its_own_key() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], replicas_per_device=2)
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    key = dropout.rngs.key[...]

    def masks() -> np.ndarray:
        ones = jnp.ones(64)
        return np.asarray(strategy.run(lambda drop: drop(ones) > 0, args=(dropout,)))

    first, second = masks(), masks()
    assert len({row.tobytes() for row in [*first, *second]}) == 8
    assert int(dropout.rngs.count[...]) == 2
    assert dropout.rngs.key[...] is key


@pytest.mark.parametrize("number", [1, 4])
def test_keys_that_a_step_assigns_are_kept(number: int) -> None:
    """A key of all replicas as it is; one that a replica derives from the first."""
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(number)])
    rngs = nnx.Rngs(dropout=1, other=2, last=3)
    before = rngs.other.key[...]

    def reseed(rngs: nnx.Rngs) -> None:
        rngs.dropout.key[...] = jax.random.key(7)
        rngs.last.key[...] = jax.random.split(rngs.last.key[...])[1]
        nnx.cond(True, lambda r: None, lambda r: None, rngs)

    strategy.run(reseed, args=(rngs,))
    assert rngs.dropout.key[...] == jax.random.key(7)
    assert rngs.other.key[...] == before
    first = nnx.Rngs(last=3).last.key[...]
    if number > 1:
        first = jax.random.fold_in(first, 0)
    assert rngs.last.key[...] == jax.random.split(first)[1]


def test_methods_and_callable_objects() -> None:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.count = nnx.Variable(jnp.array(0))

        def __call__(self, by: jax.Array) -> jax.Array:
            self.count[...] += by
            return self.count[...]

        add = __call__

    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    counter = Counter()
    assert int(strategy.run(counter, args=(2,))) == 2
    assert int(strategy.run(counter.add, args=(3,))) == 5
    assert int(counter.count[...]) == 5


def test_a_call_with_an_object_of_equal_structure_uses_the_same_program() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    num_traces = 0

    def first_row(model: Model) -> jax.Array:
        nonlocal num_traces
        num_traces += 1
        return model.first.kernel[0]

    strategy.run(first_row, args=(Model(nnx.Rngs(0)),))
    expected = num_traces
    other = Model(nnx.Rngs(1))
    out = strategy.run(first_row, args=(other,))
    assert num_traces == expected
    np.testing.assert_array_equal(out, other.first.kernel[0])


def test_old_values_are_kept_unless_donated() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    counter = nnx.Variable(jnp.arange(4.0))

    def add(counter: nnx.Variable[jax.Array]) -> None:
        counter[...] = counter[...] + 1

    strategy.run(add, args=(counter,))
    before = counter[...]
    strategy.run(add, args=(counter,))
    np.testing.assert_array_equal(before, np.arange(4.0) + 1)

    before = counter[...]
    strategy.run(add, args=(counter,), donate=(0,))
    assert before.is_deleted()
    np.testing.assert_array_equal(counter[...], np.arange(4.0) + 3)


def test_an_error_leaves_the_objects_as_they_were() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    counter = nnx.Variable(jnp.arange(4.0))

    def fail(counter: nnx.Variable[jax.Array]) -> None:
        counter[...] = counter[...] + 1
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        strategy.run(fail, args=(counter,))
    np.testing.assert_array_equal(counter[...], np.arange(4.0))


def differing_weight(model: Model) -> None:
    replica = rx.get_replica_context().replica_id_in_sync_group
    model.last.bias[...] = model.last.bias + replica


def new_attribute(model: Model) -> None:
    model.extra = nnx.Param(jnp.zeros(2))


def other_dtype(model: Model) -> None:
    model.last.bias.set_value(model.last.bias[...].astype("bfloat16"))


@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (
            differing_weight,
            rx.DivergenceError,
            r"args\[0\]/last/bias.*line \d+",
        ),
        (new_attribute, TypeError, r"new_attribute.*structure.*extra"),
        (other_dtype, TypeError, r"bfloat16\[10\] to args\[0\]/last/bias"),
        (lambda model: {"model": model}, TypeError, r"results\['model'\].*Model"),
    ],
)
def test_refused_steps(fn: Any, error: type[Exception], match: str) -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model = Model(nnx.Rngs(0))
    with pytest.raises(error, match=match):
        strategy.run(fn, args=(model,))


OUTER = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@dataclasses.dataclass
class Trainer:
    """Holds a model, as a class of a user may."""

    model: nnx.Linear

    def step(self, x: jax.Array) -> jax.Array:
        return self.model(x)


def reads_a_global(x: jax.Array) -> jax.Array:
    return OUTER(x)


def reads_a_default(x: jax.Array, model: nnx.Linear = OUTER) -> jax.Array:
    return model(x)


def reads_an_attribute(x: jax.Array) -> jax.Array:
    return reads_an_attribute.apply(x)


reads_an_attribute.apply = reads_a_global


@functools.wraps(reads_a_global)
def reads_what_is_wrapped(x: jax.Array) -> jax.Array:
    return inspect.unwrap(reads_what_is_wrapped)(x)


def reads_the_state(x: jax.Array) -> jax.Array:
    return x * jax.tree.leaves(nnx.split(OUTER)[1])[0].sum()


def reads_a_copy(x: jax.Array) -> jax.Array:
    return copy.deepcopy(OUTER)(x)


class Table(nnx.Module):
    def __init__(self) -> None:
        self.array = nnx.data(jnp.ones((2, 2)))


TABLE = Table()


def reads_an_array(x: jax.Array) -> jax.Array:
    return x @ TABLE.array


def reads_in_a_transformation(x: jax.Array) -> jax.Array:
    return nnx.vmap(OUTER)(x)


@pytest.mark.parametrize(
    ("fn", "others"),
    [
        (reads_a_global, ()),
        (reads_a_default, ()),
        (reads_an_attribute, ()),
        (reads_what_is_wrapped, ()),
        (reads_the_state, ()),
        (reads_a_copy, ()),
        (reads_in_a_transformation, ()),
        (reads_an_array, ()),
        (Trainer(OUTER).step, ()),
        (lambda x, fn: fn(x), (reads_an_attribute,)),
        (lambda x, fn: fn(x), (functools.partial(reads_a_default, model=OUTER),)),
        (lambda x, trainer: trainer.step(x), (Trainer(OUTER),)),
        (lambda x, trainers: trainers[0].model(x), ([Trainer(OUTER)],)),
    ],
)
def test_objects_that_are_no_arguments_are_refused(fn: Any, others: Any) -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    name = "(an NNX variable, Param|Table.array)"
    expected = rf"reads {name} of float32\[2(,2)?\].*Pass the object"
    with pytest.raises(TypeError, match=expected):
        strategy.run(fn, args=(jnp.ones((1, 2)), *others))
    assert isinstance(OUTER.kernel[...], jax.Array)


def test_static_attributes_of_other_objects_may_be_used() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def scaled(model: nnx.Linear) -> jax.Array:
        new = nnx.Linear(OUTER.in_features, 2, rngs=nnx.Rngs(1))
        return model.kernel + new.kernel

    np.testing.assert_array_equal(
        strategy.run(scaled, args=(OUTER,)),
        OUTER.kernel + nnx.Linear(2, 2, rngs=nnx.Rngs(1)).kernel,
    )


@pytest.mark.parametrize("option", ["ref", "hijax"])
def test_mutable_arrays_of_jax_are_refused(option: str) -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    variable = nnx.Param(jnp.ones(2), **{option: True})
    with pytest.raises(TypeError, match=rf"args\[0\].*{option}=True"):
        strategy.run(lambda v: 2 * v[...], args=(variable,))


def test_an_object_of_another_strategy_is_refused() -> None:
    model = Model(nnx.Rngs(0))
    rx.MirroredStrategy(["cpu:0", "cpu:1"]).run(lambda m: m.last.bias[0], args=(model,))
    other = rx.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    with pytest.raises(ValueError, match=r"args\[0\]/.* is on 2 devices"):
        other.run(lambda m: m.last.bias[0], args=(model,))


def test_strategies_without_variables_on_replicas_refuse_objects() -> None:
    strategy = rx.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(NotImplementedError, match=r"args\[0\].*CentralStorage"):
        strategy.run(lambda m: m.last.bias[0], args=(Model(nnx.Rngs(0)),))
