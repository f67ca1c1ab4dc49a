"""Arguments and results as JSON: all that is allowed comes back as it was."""

import json
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import replicax as rx
from replicax.ps.payloads import MAX_BYTES, decode, encode, require_size


def sent(value):
    return decode(json.loads(json.dumps(encode(value, "it"))))


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=20,
)


@given(trees)
def test_trees_come_back_equal_and_of_the_same_types(value):
    assert repr(sent(value)) == repr(value)


@given(
    arrays.arrays(
        st.sampled_from(["bool", "int8", "uint64", "float16", "float64", "complex64"]),
        arrays.array_shapes(min_dims=0, min_side=0),
    )
)
def test_arrays_come_back_bit_by_bit(array):
    back = sent(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


def test_arrays_of_jax_and_keras():
    back = sent([jnp.ones((2,), "bfloat16"), keras.Variable([1.5]), np.float32(2.5)])
    assert back[0].dtype == jnp.bfloat16
    assert back[1].tolist() == [1.5]
    assert type(back[2]) is np.float32
    replicas = sent(rx.PerReplica(np.arange(2)))
    assert replicas.values == (0, 1)
    assert math.isnan(sent(math.nan))


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (
            {"a": [1, (len,)]},
            r"args\[0\]\['a'\]\[1\]\[0\] is of type 'builtin_function",
        ),
        (Point(1), r"args\[0\] is of type 'Point'.*close over it"),
        (np.array(["a"]), r"args\[0\] is an array of dtype <U1"),
        (np.array([None]), "is an array of dtype object"),
        (jax.random.key(0), "random keys"),
    ],
)
def test_what_is_no_data_is_refused_by_its_place(value, where):
    with pytest.raises(TypeError, match=where):
        encode(value, "args[0]")


@pytest.mark.parametrize(
    "value",
    [
        {"$": "code"},
        {},
        {"$": "mark", "kind": "worker"},
        {"$": "array", "dtype": "object", "shape": [1], "scalar": False, "v": "AAAA"},
        {"$": "array", "dtype": "float32", "shape": [9], "scalar": False, "v": "AAAA"},
    ],
)
def test_other_json_is_refused(value):
    with pytest.raises((ValueError, TypeError)):
        decode(value)


def test_large_values_are_refused():
    require_size("x" * (MAX_BYTES - 2), "the result of f")
    with pytest.raises(ValueError, match=r"the result of f has 3,145,729 bytes"):
        require_size("x" * (MAX_BYTES - 1), "the result of f")
