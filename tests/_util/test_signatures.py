"""The number of arguments that a function is meant for, whatever its parameters."""

import functools

import jax
import pytest

from replicax._util.signatures import positional_count


def unnamed(fn):
    """A decorator that does not use `functools.wraps`."""

    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def wrapped(fn):
    return functools.wraps(fn)(unnamed(fn))


def with_state(fn):
    """A decorator that adds an argument, which `__wrapped__` does not have."""

    @functools.wraps(fn)
    def wrapper(self, state, data):
        return fn(self, data), state

    return wrapper


class Steps:
    def one(self, data):
        pass

    def two(self, state, data):
        pass

    def one_with_an_option(self, data, training=True):
        pass

    def one_with_keywords(self, data, *, training=True, **kwargs):
        pass

    def two_and_more(self, state, data, *args, **kwargs):
        pass

    def two_with_options(self, state, data, training=True):
        pass

    def any_number(self, *args, **kwargs):
        pass

    unknown = unnamed(one)
    wrapped_twice = wrapped(wrapped(one))
    one_and_a_state = with_state(one)


@pytest.mark.parametrize(
    "decorator", [lambda fn: fn, wrapped, functools.partialmethod, jax.jit]
)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one", 1),
        ("two", 2),
        ("one_with_an_option", 1),
        ("one_with_keywords", 1),
        ("two_and_more", 2),
        ("two_with_options", 2),
        ("any_number", None),
        ("unknown", None),
        ("wrapped_twice", 1),
    ],
)
def test_methods(decorator, name, expected):
    decorated = type("Decorated", (Steps,), {"step": decorator(vars(Steps)[name])})
    assert positional_count(decorated().step, 1) == expected


def test_a_decorator_with_parameters_of_its_own():
    assert positional_count(Steps().one_and_a_state, 1) == 2


def test_partials():
    two = functools.partial(vars(Steps)["two"], Steps())
    assert positional_count(two, 1) == 2
    assert positional_count(functools.partial(two, "state"), 1) == 1
    assert positional_count(functools.partial(Steps.any_number, Steps()), 1) is None


def test_no_argument_or_one():
    assert positional_count(lambda: None, 0) == 0
    assert positional_count(lambda context: None, 0) == 1
    assert positional_count(lambda size=32: None, 0) == 0
    assert positional_count(wrapped(lambda context: None), 0) == 1


def test_neither_number_is_accepted():
    with pytest.raises(TypeError, match=r"lambda.*a, b, c.*neither with 1 nor with 2"):
        positional_count(lambda a, b, c: None, 1)
    with pytest.raises(TypeError, match="neither"):
        positional_count(lambda **kwargs: None, 1)
