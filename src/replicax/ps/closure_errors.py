"""Serializes errors of closures, from the worker to the chief's script."""

import builtins
import traceback

from replicax import errors

__all__ = [
    "CANCELLED",
    "ClosureCancelledError",
    "ClosureError",
    "error_from_json",
    "error_to_json",
]

CANCELLED = "ClosureCancelledError"


class ClosureError(RuntimeError):
    """A closure has raised an error that is no builtin exception."""


class ClosureCancelledError(ClosureError):
    """A closure was not run, since one before it has raised an error."""


def error_to_json(
    error: BaseException, function: str, worker: str, caller: str
) -> dict[str, str]:
    """What a worker tells of an error: its type, message and traceback.

    Args:
        error: What the closure raised.
        function: Its name.
        worker: Where it ran.
        caller: The file that called it, whose frames come first and say nothing.
    """
    shown = traceback.TracebackException.from_exception(error)
    while shown.stack and shown.stack[0].filename == caller:
        del shown.stack[0]
    return {
        "type": type(error).__qualname__,
        "message": str(error),
        "traceback": f"In {function} on {worker}:\n{''.join(shown.format())}",
    }


def error_from_json(error: dict[str, str]) -> Exception:
    """The error to raise: of the original type, if that is builtin or of replicax.

    Example:
        >>> error_from_json({"type": "KeyError", "message": "7", "traceback": "At 1."})
        KeyError('7')
    """
    made = _error(error)
    if error["traceback"]:
        made.add_note(error["traceback"].rstrip())
    return made


def _error(error: dict[str, str]) -> Exception:
    name, message = error["type"], error["message"]
    if name == CANCELLED:
        return ClosureCancelledError(message)
    if name == "StopIteration":
        # As itself it would end loops and generators that it passes.
        return ClosureError(
            f"StopIteration: {message or 'an iterator is at its end'}. Let datasets of "
            "closures repeat, and decide by the number of steps when to stop."
        )
    kind = getattr(builtins, name, None) or getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # Such as UnicodeDecodeError, which wants five arguments.
            pass
    return ClosureError(f"{name}: {message}")
