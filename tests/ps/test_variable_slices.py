"""Blocks cover the vectors, and splitting and joining give what was there."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.ps.partition import VariableGroup, VariableSlice
from replicax.ps.server_optimizer import fused_spans, join, split, split_slices

PARTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), max_size=2).map(tuple),
        st.sampled_from(["float32", "int32"]),
        st.sampled_from([None, "a", "b"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, database=None, max_examples=40)
@given(PARTS)
def test_split_and_join_are_each_others_reverse(drawn) -> None:
    parts = [
        VariableSlice(variable=i, path=str(kind), shape=shape, dtype=dtype, server=0)
        for i, (shape, dtype, kind) in enumerate(drawn)
    ]
    group = VariableGroup(name="g", rule={}, parts=tuple(parts))
    blocks = fused_spans(parts, lambda p: None if p.path == "None" else p.path)
    assert sorted(i for b in blocks for i in b.parts) == list(range(len(parts)))
    for block in blocks:
        assert len({(parts[i].path, parts[i].dtype) for i in block.parts}) == 1
        assert len(block.parts) == 1 or parts[block.parts[0]].path != "None"
        assert block.size == sum(parts[i].size for i in block.parts)
    lengths = group.lengths_on(0)
    vectors = {d: np.arange(n, dtype=d) for d, n in lengths.items()}
    values = split(blocks, vectors)
    joined = join(blocks, values, vectors)
    for dtype, vector in vectors.items():
        np.testing.assert_array_equal(joined[dtype], vector)

    starts = dict.fromkeys(lengths, 0)
    pieces = {}
    for block, value in zip(blocks, values, strict=True):
        for i, piece in zip(
            block.parts, split_slices(block, parts, np.asarray(value)), strict=True
        ):
            pieces[i] = piece
    for i, part in enumerate(parts):
        start = starts[part.dtype]
        starts[part.dtype] = start + part.size
        expected = np.arange(start, start + part.size).reshape(part.shape)
        np.testing.assert_array_equal(pieces[i], expected)
    for block, value in zip(blocks, values, strict=True):
        again = split_slices(block, parts, np.asarray(value))
        for i, piece in zip(block.parts, again, strict=True):
            np.testing.assert_array_equal(piece, pieces[i])
