"""Which variables are sharded between steps, and along which dimension."""

from typing import Any

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax._private.keras import set_reference
from replicax.engine.layouts import Layouts


def layouts(num: int = 4, **options: Any) -> Layouts:
    return Layouts(axis_name="replica", num_devices=num, **options)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((64, 256), P(None, "replica")),
        ((256, 64), P("replica", None)),
        ((64, 64), P("replica", None)),  # The first of equal ones.
        ((3, 3, 32, 64), P(None, None, None, "replica")),
        ((1023, 8), P(None, "replica")),  # The largest does not divide.
        ((1024,), P("replica")),
        ((1020,), P()),  # Too small.
        ((1023, 7), P()),
        ((), P()),
        ((0, 4096), P()),
    ],
    ids=str,
)
def test_dimension(shape: tuple[int, ...], spec: P) -> None:
    rule = layouts(split_slots=True)
    assert rule.of_slot("w", shape, "none") == spec
    # A weight is sharded only with `split_weights`; its update always is.
    weight = keras.Variable(keras.ops.zeros(shape))
    assert rule.of(weight) == P()
    assert layouts(split_slots=True, split_weights=True).of(weight) == spec
    expected = None if spec == P() else tuple(spec).index("replica")
    assert rule.dim_of_update(weight) == expected


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
def test_variables_of_each_replica_are_whole(aggregation: str) -> None:
    rule = layouts(split_slots=True, split_weights=True)
    variable = keras.Variable(keras.ops.zeros((64, 64)), aggregation=aggregation)
    assert rule.of(variable) == P()
    assert rule.of_slot("w", (64, 64), aggregation) == P()


def test_variables_of_the_first_replica_are_sharded() -> None:
    rule = layouts(split_slots=True, split_weights=True)
    assert rule.of_slot("w", (64, 64), "only_first_replica") == P("replica", None)


def test_seeds_and_counters_are_whole() -> None:
    rule = layouts(split_slots=True, split_weights=True)
    assert rule.of(keras.random.SeedGenerator(1).state) == P()
    optimizer = keras.optimizers.Adam()
    assert [rule.of(v) for v in optimizer.variables] == [P(), P()]


@pytest.mark.parametrize("options", [{}, {"split_slots": True}], ids=["whole", "one"])
def test_nothing_is_split(options: Any) -> None:
    rule = layouts(1 if options else 4, **options)
    assert rule.of_slot("w", (64, 64), "none") == P()
    assert rule.dim_of_update(keras.Variable(keras.ops.zeros((64, 64)))) is None


def test_a_variable_with_a_reference_is_a_slot() -> None:
    rule = layouts(split_slots=True)
    slot = keras.Variable(keras.ops.zeros((64, 64)))
    assert rule.of(slot) == P()
    set_reference(slot, "dense/kernel")
    assert rule.of(slot) == P("replica", None)


def test_split_over_two_axes() -> None:
    rule = layouts(
        split_slots=True,
        of_path=lambda path, shape: P(None, "model") if path == "wide" else P(),
    )
    # The largest dimension is split over "model" already.
    assert rule.of_slot("wide", (64, 256), "none") == P("replica", "model")
    assert rule.of_slot("other", (64, 256), "none") == P(None, "replica")
    assert rule.of_slot("wide", (2, 2048), "none") == P(None, "model")
    assert rule.dim_in(P(None, "model")) is None
    assert rule.dim_in(P("replica", "model")) == 0


@given(
    shape=st.lists(st.integers(1, 300), max_size=4).map(tuple),
    num=st.sampled_from([2, 3, 4, 8]),
)
def test_blocks_are_equal_and_the_largest_possible(
    shape: tuple[int, ...], num: int
) -> None:
    spec = layouts(num, split_slots=True).of_slot("w", shape, "none")
    split = [d for d, name in enumerate(spec) if name == "replica"]
    assert len(split) <= 1
    divisible = [size for size in shape if size % num == 0]
    for dim in split:
        assert shape[dim] == max(divisible)
    size = 1
    for n in shape:
        size *= n
    assert bool(split) == (bool(divisible) and size >= 1024)


def test_slots_are_split_like_their_weights() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_update=True)
    with strategy.scope():
        layer = keras.layers.Dense(64)
        layer.build((32,))
        optimizer = keras.optimizers.Adam()
        optimizer.build(layer.trainable_variables)
    specs = [v.value.sharding.spec for v in optimizer.variables]
    whole, split = P(), P(None, "replica")
    #                iteration, rate,  kernel,       bias
    assert specs == [whole, whole, split, split, whole, whole]
    assert strategy.group.layouts.dim_of_update(layer.kernel) == 1
