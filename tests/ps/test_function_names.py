"""Names of functions are the same wherever the same script runs."""

import functools

import pytest

from replicax.ps.payloads import FunctionNames


def make(n):
    def inner():
        return n

    return inner


def script():
    functions = FunctionNames()
    made = [make(1), make(2), make(1), len, functools.partial(pow, 2)]
    made += [functools.partial(pow, 2), functools.partial(pow, 3), lambda: 1]
    return functions, [functions.register(fn) for fn in made]


def test_equal_functions_share_a_name_and_others_are_numbered():
    functions, names = script()
    assert names[:3] == [
        f"{__name__}.make.<locals>.inner",
        f"{__name__}.make.<locals>.inner (2)",
        f"{__name__}.make.<locals>.inner",
    ]
    assert names[3] == "builtins.len"
    assert names[4] == names[5] != names[6]
    assert functions[names[1]]() == 2
    assert functions[names[4]](3) == 8
    assert script()[1] == names  # Other objects, the same script.
    assert sorted(functions.names) == sorted(set(names))


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="fn must be a function; got 3"):
        FunctionNames().register(3)


def test_functions_made_anew_without_end_are_refused():
    functions = FunctionNames()
    for n in range(1000):
        functions.register(make(n))
    functions.register(make(7))  # Known.
    with pytest.raises(ValueError, match="1000 different functions have been sched"):
        functions.register(make(1000))
