"""Payloads of closures: values, per-worker values, names of functions, and errors."""

import functools
import gc
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
from replicax.ps.payloads import (
    MAX_BYTES,
    ClosureCancelledError,
    ClosureError,
    FunctionNames,
    PerWorkerSources,
    PerWorkerValues,
    dataset_maker,
    decode,
    encode,
    error_from_json,
    error_to_json,
    require_size,
)

# Values.


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
def test_other_values_are_refused_by_their_place(value, where):
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


# Per-worker values.


def test_a_value_is_created_once_on_first_use():
    sources = PerWorkerSources()
    made = []
    value = PerWorkerValues(sources, lambda: made.append(1) or [1, 2], "dataset f")
    iterator = iter(value)
    assert made == []
    assert next(sources.own(iterator.per_worker_number)) == 1
    assert next(sources.own(iterator.per_worker_number)) == 2
    assert sources.own(value.per_worker_number) == [1, 2]
    assert made == [1]
    assert iter(iterator) is iterator
    assert repr(iterator) == "PerWorkerValues(iter of dataset f)"
    with pytest.raises(TypeError, match="call next in fn"):
        next(iterator)


def test_only_the_newest_values_and_values_in_use_are_kept():
    sources = PerWorkerSources()
    kept = PerWorkerValues(sources, lambda: [7], "dataset")
    for _ in range(40):
        iter(kept)
    gc.collect()
    assert sources.own(kept.per_worker_number) == [7]
    assert next(sources.own(40)) == 7
    with pytest.raises(rx.ClusterMismatchError, match="value 1; this task's scri"):
        sources.own(1)
    with pytest.raises(rx.ClusterMismatchError, match="value 41"):
        sources.own(41)


def test_datasets_and_functions_with_and_without_a_context():
    context = rx.InputContext(num_input_pipelines=3, input_pipeline_id=2)
    assert dataset_maker([1], lambda: context)() == [1]
    assert dataset_maker(lambda: [2], lambda: context)() == [2]
    assert dataset_maker(lambda x=5: [x], lambda: context)() == [5]
    assert dataset_maker(lambda c: [c.input_pipeline_id], lambda: context)() == [2]

    @functools.wraps(lambda c: None)
    def wrapper(*args):
        return [args[0].num_input_pipelines]

    assert dataset_maker(wrapper, lambda: context)() == [3]
    assert dataset_maker(lambda *args: [*args], lambda: context)() == []


# Names of functions.


def closing_over(n):
    def inner():
        return n

    return inner


def script():
    functions = FunctionNames()
    made = [
        closing_over(1),
        closing_over(2),
        closing_over(1),
        len,
        functools.partial(pow, 2),
    ]
    made += [functools.partial(pow, 2), functools.partial(pow, 3), lambda: 1]
    return functions, [functions.register(fn) for fn in made]


def test_equal_functions_share_a_name_and_others_are_numbered():
    functions, names = script()
    assert names[:3] == [
        f"{__name__}.closing_over.<locals>.inner",
        f"{__name__}.closing_over.<locals>.inner (2)",
        f"{__name__}.closing_over.<locals>.inner",
    ]
    assert names[3] == "builtins.len"
    assert names[4] == names[5] != names[6]
    assert functions[names[1]]() == 2
    assert functions[names[4]](3) == 8
    assert script()[1] == names  # Other objects, the same script.
    assert sorted(functions.names) == sorted(set(names))


def test_other_objects_than_functions_are_refused():
    with pytest.raises(TypeError, match="fn must be a function; got 3"):
        FunctionNames().register(3)


# Errors.


class OwnError(Exception):
    pass


def raised(error):
    def closure():
        raise error

    try:
        closure()
    except Exception as caught:  # noqa: BLE001
        return error_from_json(
            error_to_json(caught, "script.step", "worker:1", "other.py")
        )
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("bad"), ValueError, "bad"),
        (KeyError("k"), KeyError, "'k'"),
        (rx.ClusterError("lost"), rx.ClusterError, "lost"),
        (OwnError("mine"), ClosureError, "OwnError: mine"),
        (StopIteration(), ClosureError, "StopIteration: an iterator is at its end"),
        (UnicodeDecodeError("a", b"", 0, 1, "no"), ClosureError, "UnicodeDecodeError"),
        (ClosureCancelledError("c"), ClosureCancelledError, "c"),
    ],
)
def test_builtin_errors_keep_their_type(error, kind, message):
    found = raised(error)
    assert type(found) is kind
    assert message in str(found)
    (note,) = found.__notes__
    assert note.startswith("In script.step on worker:1:\nTraceback")
    assert "raise error" in note


def test_frames_of_the_caller_are_left_out():
    try:
        int("no")
    except ValueError as error:
        told = error_to_json(error, "f", "worker:1", __file__)
    assert told["traceback"].count("File") == 0


def test_names_of_other_builtins_are_not_called():
    for name in ("print", "KeyboardInterrupt", "__all__", "Sequence"):
        error = {"type": name, "message": "m", "traceback": ""}
        assert type(error_from_json(error)) is ClosureError
