"""What a function is meant for, of all that Python can make of its parameters."""

import functools
import types

import jax
import pytest

from replicax._util.signatures import positional_count


def anyhow(fn):
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def wrapped(fn):
    return functools.wraps(fn)(anyhow(fn))


def with_self(fn):
    def wrapper(self, *args):
        return fn(self, *args)

    return wrapper


class Decorator:
    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *args):
        return self.fn(*args)

    def __get__(self, owner, kind=None):
        return types.MethodType(self, owner)


class PartialDecorator(Decorator):
    def __get__(self, owner, kind=None):
        return functools.partial(self.__call__, owner)


def other(fn):
    """Adds an argument, which `__wrapped__` knows nothing of."""

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

    any_number_of_anything = anyhow(lambda *args: None)
    made_two = other(one)


DECORATORS = [
    anyhow,
    wrapped,
    with_self,
    Decorator,
    PartialDecorator,
    lambda fn: anyhow(wrapped(fn)),
    lambda fn: wrapped(anyhow(fn)),
    lambda fn: functools.partialmethod(fn),
    jax.jit,
]


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one", 1),
        ("two", 2),
        ("one_with_an_option", 1),
        ("two_and_more", 2),
        ("any_number", None),
    ],
)
def test_decorated(decorator, name, expected):
    decorated = type("Decorated", (Steps,), {"step": decorator(vars(Steps)[name])})
    assert positional_count(decorated().step, 1) == expected


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
        ("any_number_of_anything", None),
        ("made_two", 2),
    ],
)
def test_methods(name, expected):
    assert positional_count(getattr(Steps(), name), 1) == expected


def test_partials():
    two = functools.partial(vars(Steps)["two"], Steps())
    assert positional_count(two, 1) == 2
    assert positional_count(functools.partial(two, "state"), 1) == 1
    assert positional_count(functools.partial(Steps.any_number, Steps()), 1) is None


def test_of_none_or_one():
    assert positional_count(lambda: None, 0) == 0
    assert positional_count(lambda context: None, 0) == 1
    assert positional_count(lambda size=32: None, 0) == 0
    assert positional_count(anyhow(lambda context: None), 0) == 1


def test_of_neither():
    with pytest.raises(TypeError, match=r"lambda.*a, b, c.*neither with 1 nor with 2"):
        positional_count(lambda a, b, c: None, 1)
    with pytest.raises(TypeError, match="neither"):
        positional_count(lambda **kwargs: None, 1)
