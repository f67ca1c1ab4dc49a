"""Slots are the same when they were cut for servers, sent, and put together."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.ps.group_vectors import (
    cut_slots,
    join_slots,
    slots_from_message,
    slots_to_message,
)
from replicax.ps.partition import FixedShardsPartitioner, VariableInfo, place

SHAPES = st.lists(
    st.lists(st.integers(1, 5), max_size=2).map(tuple), min_size=1, max_size=5
)


@settings(database=None, max_examples=40)
@given(SHAPES, st.integers(1, 3), st.none() | st.integers(2, 4))
def test_slots_come_back_as_they_were(shapes, num_servers, num_shards) -> None:
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
