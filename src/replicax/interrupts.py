"""Python's signal handlers, held back while a step may not be left half done.

A handler may raise, as that of Ctrl-C does, between any two instructions of Python. The
steps themselves are dispatched and stored by one call of C, which no handler comes
into; this is for the rare ones that take several instructions.
"""

import _signal
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["heeding_interrupts", "raise_unheeded", "uninterrupted"]

T = TypeVar("T")


def uninterrupted(call: Callable[[], T]) -> T:
    """Call a function; handlers of signals that come meanwhile are called after it.

    Their exceptions are raised then. It takes about 10 us. `call` should store what may
    not be lost: its result is, if a handler raises.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()  # Handlers are called in the main thread only.
    held = _HeldBack()
    try:
        held.hold()
        return call()
    finally:
        held.release()


class _HeldBack:
    """The handlers that this process has, and the signals that wait for them."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._waiting: list[int] = []
        self._holds = True

    def hold(self) -> None:
        """Take the handlers' places."""
        # The functions of `signal` make enumerations of it all, which takes 20 times
        # as long.
        for number in range(1, _signal.NSIG):
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._note)

    def release(self) -> None:
        """Give the handlers their places back, and call those that were waited for."""
        self._holds = False
        try:
            for number in self._handlers:
                self._restore(number)
        finally:
            self._deliver()

    def _restore(self, number: int) -> None:
        if _signal.getsignal(number) == self._note:  # `call` may have set another.
            _signal.signal(number, self._handlers[number])

    def _note(self, number: int, frame: Any) -> None:
        if self._holds:
            self._waiting.append(number)
            return
        # A handler that was back already has raised before this one was.
        self._restore(number)
        self._handlers[number](number, frame)

    def _deliver(self) -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            try:
                self._handlers[number](number, sys._getframe())
            finally:  # One that raises keeps no other from being called.
                self._deliver()


_unheeded: list[int] = []


def heeding_interrupts(call: Callable[[], T]) -> T:
    """Call a function in which one Ctrl-C is enough, even if some code swallows it.

    Destructors, callbacks of the garbage collector and of C libraries swallow the
    `KeyboardInterrupt`. `raise_unheeded`, at a step's beginning, raises it again then.
    A handler of the user's own is left alone.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        return call()

    def note(number: int, frame: Any) -> None:
        _unheeded.append(number)
        signal.default_int_handler(number, frame)

    _unheeded.clear()
    try:
        signal.signal(signal.SIGINT, note)
        return call()
    finally:
        if _signal.getsignal(signal.SIGINT) is note:
            _signal.signal(signal.SIGINT, signal.default_int_handler)
        _unheeded.clear()


def raise_unheeded() -> None:
    """Raise the `KeyboardInterrupt` that some code has swallowed, if one did."""
    if _unheeded:
        _unheeded.clear()
        raise KeyboardInterrupt
