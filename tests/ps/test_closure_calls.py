"""Errors of closures, from the worker to the chief's script."""

import pytest

import replicax as rx
from replicax.ps.payloads import (
    ClosureCancelledError,
    ClosureError,
    error_from_json,
    error_to_json,
)


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


def test_names_that_are_no_exceptions_are_not_called():
    for name in ("print", "KeyboardInterrupt", "__all__", "Sequence"):
        error = {"type": name, "message": "m", "traceback": ""}
        assert type(error_from_json(error)) is ClosureError
