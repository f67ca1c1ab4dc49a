"""Arrays as flat vectors and as bytes, and back."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from replicax._util.arrays import FlatLayout, array_of, bytes_of

LAYOUT = FlatLayout(
    [("float32", (2, 3)), ("int32", ()), ("float32", (0, 4)), ("float32", (1,))]
)


ARRAYS = [
    np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    for dtype, shape in LAYOUT.entries
]


def joined(arrays):
    return {d: np.concatenate(found) for d, found in LAYOUT.pieces(arrays).items()}


@pytest.mark.parametrize(
    ("numpy", "unpack"), [(np, LAYOUT.unpack), (jnp, jax.jit(LAYOUT.unpack))]
)
def test_unpack_reverses_pieces(numpy, unpack):
    vectors = joined(ARRAYS)
    assert {d: v.shape for d, v in vectors.items()} == {"float32": (7,), "int32": (1,)}
    assert LAYOUT.lengths == {"float32": 7, "int32": 1}
    assert [start for _, start, _ in LAYOUT.spans] == [0, 0, 6, 6]
    vectors = {dtype: numpy.asarray(vector) for dtype, vector in vectors.items()}
    for array, found in zip(ARRAYS, unpack(vectors), strict=True):
        assert isinstance(found, np.ndarray if numpy is np else jax.Array)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


def test_pieces_are_views():
    pieces = LAYOUT.pieces(ARRAYS)
    assert np.shares_memory(pieces["float32"][0], ARRAYS[0])


def test_another_number_of_arrays_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        LAYOUT.pieces([np.zeros((2, 3))])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3).T,
        np.array(2.5),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
    ],
)
def test_bytes(array):
    data = bytes_of(array)
    assert data.nbytes == array.nbytes
    back = array_of(data.tobytes(), array.dtype.name, array.shape)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
