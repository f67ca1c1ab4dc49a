"""Partitioners give TensorFlow's numbers; parts cover all rows and are balanced."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.ps.group_vectors import (
    cut_slots,
    join_slots,
    slots_from_message,
    slots_to_message,
)
from replicax.ps.partition import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    VariableGroup,
    VariableInfo,
    place,
)

ADD = {"kind": "add"}


# What tf.distribute.experimental.partitioners of TensorFlow 2.21 returns.
@pytest.mark.parametrize(
    ("partitioner", "shape", "dtype", "expected"),
    [
        (FixedShardsPartitioner(2), [10, 3], "float32", [2, 1]),
        (FixedShardsPartitioner(num_shards=20), [10, 3], "float32", [10, 1]),
        (MinSizePartitioner(), [10**6], "float32", [1]),
        (MinSizePartitioner(4, 2), [6, 1], "float32", [2, 1]),
        (MinSizePartitioner(4, 10), [6, 1], "float32", [6, 1]),
        (MinSizePartitioner(max_shards=100), [1024, 1024], "float32", [16, 1]),
        (MinSizePartitioner(max_shards=100), [1024, 1025], "float32", [17, 1]),
        (MinSizePartitioner(max_shards=100), [1024, 1024], "bfloat16", [8, 1]),
        (MaxSizePartitioner(4), [6, 1], "float32", [6, 1]),
        (MaxSizePartitioner(4, max_shards=2), [6, 1], "float32", [2, 1]),
        (MaxSizePartitioner(1024), [6, 1], "float32", [1, 1]),
        (MaxSizePartitioner(100), [10, 3], "float64", [3, 1]),
        (MaxSizePartitioner(1), [7, 3], "int8", [7, 1]),
    ],
)
def test_numbers_are_tensorflows(partitioner, shape, dtype, expected) -> None:
    assert partitioner(shape, dtype) == expected
    assert partitioner(shape=tuple(shape), dtype=dtype, axis=0) == expected


def test_other_axes_and_wrong_arguments() -> None:
    assert FixedShardsPartitioner(4)([10, 3], "float32", axis=1) == [1, 3]
    for make in (
        lambda: FixedShardsPartitioner(0),
        lambda: MinSizePartitioner(min_shard_bytes=0),
        lambda: MinSizePartitioner(max_shards=0),
        lambda: MaxSizePartitioner(0),
        lambda: MaxSizePartitioner(4, max_shards=-1),
    ):
        with pytest.raises(ValueError, match=r"Partitioner: got .*expected at least 1"):
            make()


def info(path="w", shape=(4, 2), dtype="float32", **more) -> VariableInfo:
    return VariableInfo(path=path, shape=shape, dtype=dtype, **more)


def test_first_shards_have_a_row_more() -> None:
    group = place("g", ADD, [info(shape=(10, 2))], 1, FixedShardsPartitioner(4))
    assert [p.rows for p in group.shards] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [p.shape for p in group.shards] == [(3, 2), (3, 2), (2, 2), (2, 2)]


def test_the_partitioner_is_not_called_for_scalars() -> None:
    def partitioner(shape, dtype):
        raise AssertionError("it was called")

    group = place("g", ADD, [info(shape=())], 3, partitioner)
    assert group.shards[0].rows is None


def test_the_largest_shards_are_assigned_first() -> None:
    sizes = [1, 8, 2, 5, 3]
    infos = [info(path=str(n), shape=(n,)) for n in sizes]
    group = place("g", ADD, infos, 2)
    assert [int(p.path) for p in group.shards] == sizes
    assert [p.server for p in group.shards] == [1, 0, 0, 1, 1]
    assert place("g", ADD, infos, 2) == group


def test_constraints_and_optimizers_keep_variables_whole(caplog) -> None:
    constrained = info(path="c", constraint={"class_name": "NonNeg"})
    infos = [info(), constrained, info(path="v")]
    group = place("g", ADD, infos, 2, FixedShardsPartitioner(2))
    assert [p.name for p in group.shards] == [
        "w[0:2]",
        "w[2:4]",
        "c",
        "v[0:2]",
        "v[2:4]",
    ]
    assert caplog.messages == [
        "group 'g': variables that the optimizer or a constraint needs whole are not "
        "split: c"
    ]
    caplog.clear()
    group = place("g", ADD, infos, 2, FixedShardsPartitioner(2), can_split=False)
    assert [p.name for p in group.shards] == ["w", "c", "v"]
    assert len(caplog.messages) == 1
    assert "not split: w, c, v" in caplog.text
    caplog.clear()
    place("g", ADD, infos, 2, can_split=False)
    assert not caplog.messages


@pytest.mark.parametrize(
    "result", [[2], [2, 1, 1], [2, 2], [0, 1], [-1, 1], [2.0, 1], [True, 1], 2, None]
)
def test_a_custom_partitioner_is_checked(result) -> None:
    with pytest.raises(
        ValueError, match=r"variable_partitioner returned .* for variable .w..*\[n, 1\]"
    ):
        place("g", ADD, [info()], 2, lambda shape, dtype: result)


def test_a_custom_partitioner_may_return_more_shards_than_rows() -> None:
    group = place("g", ADD, [info()], 2, lambda shape, dtype: (np.int64(9), 1))
    assert [p.rows for p in group.shards] == [(0, 1), (1, 2), (2, 3), (3, 4)]


PARTITIONERS = st.one_of(
    st.none(),
    st.builds(FixedShardsPartitioner, st.integers(1, 9)),
    st.builds(MinSizePartitioner, st.integers(1, 64), st.integers(1, 9)),
    st.builds(MaxSizePartitioner, st.integers(1, 64), st.none() | st.integers(1, 9)),
)
INFOS = st.lists(
    st.builds(
        info,
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        dtype=st.sampled_from(["float32", "bfloat16", "float64", "int8", "bool"]),
    ),
    max_size=8,
)


@settings(database=None)
@given(INFOS, st.integers(1, 5), PARTITIONERS)
def test_every_row_is_on_one_server_and_servers_are_balanced(
    infos, num_servers, partitioner
) -> None:
    group = place("g", ADD, infos, num_servers, partitioner)
    assert VariableGroup.from_json(group.to_json()) == group
    rows = {i: [] for i in range(len(infos))}
    loads, largest = [0] * num_servers, 0
    for part in group.shards:
        whole = infos[part.variable]
        if part.rows is None:
            assert part.shape == whole.shape
            rows[part.variable].append((0, whole.shape[0] if whole.shape else 1))
        else:
            assert part.shape == (part.rows[1] - part.rows[0], *whole.shape[1:])
            assert part.rows[1] > part.rows[0]
            rows[part.variable].append(part.rows)
        size = part.size * np.dtype(part.dtype).itemsize
        loads[part.server] += size
        largest = max(largest, size)
    assert [p.variable for p in group.shards] == sorted(
        p.variable for p in group.shards
    )
    for i, covered in rows.items():
        starts = [0, *(stop for _, stop in covered)]
        assert [start for start, _ in covered] == starts[:-1]
        assert starts[-1] == (infos[i].shape[0] if infos[i].shape else 1)
    assert max(loads) - min(loads) <= largest
    assert sum(loads) == sum(
        math.prod(i.shape) * np.dtype(i.dtype).itemsize for i in infos
    )


# Optimizer state.

SHAPES = st.lists(
    st.lists(st.integers(1, 5), max_size=2).map(tuple), min_size=1, max_size=5
)


@settings(database=None, max_examples=40)
@given(SHAPES, st.integers(1, 3), st.none() | st.integers(2, 4))
def test_slots_survive_cutting_and_joining(shapes, num_servers, num_shards) -> None:
    infos = [
        VariableInfo(path=f"v{i}", shape=shape, dtype="float32")
        for i, shape in enumerate(shapes)
    ]
    partitioner = None if num_shards is None else FixedShardsPartitioner(num_shards)
    rule = {"kind": "optimizer", "config": {}}
    group = place("weights", rule, infos, num_servers, partitioner)
    rng = np.random.default_rng(0)
    slots = {("iteration", None): np.array(7)}
    slots |= {("momentum", i): rng.random(shape) for i, shape in enumerate(shapes)}
    on_servers = {}
    for server in {part.server for part in group.shards}:
        header, vectors = slots_to_message(cut_slots(group, slots, server))
        assert all(vector.ndim == 1 for vector in vectors.values())
        on_servers[server] = slots_from_message(header, vectors)
    again = join_slots(group, on_servers)
    assert again.keys() == slots.keys()
    for key, array in slots.items():
        np.testing.assert_array_equal(again[key], array)
