"""Defers signal handlers during critical sections; raises swallowed interrupts again.

A handler may raise, as that of Ctrl-C does, between any two instructions of Python.
Ordinary steps are dispatched and stored by one call into C, which handlers cannot
interrupt; the critical sections are the rare steps that take several instructions.
"""

import _signal
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from replicax._util.user_code import is_installed_file

__all__ = [
    "describe_interrupts",
    "described",
    "raise_swallowed",
    "reraising_interrupts",
    "shortened",
    "uninterrupted",
]

T = TypeVar("T")


def uninterrupted(call: Callable[[], T]) -> T:
    """Call a function, and defer signal handlers until it returns.

    The handlers' exceptions are raised then. It takes about 10 us. If a handler raises,
    the result of `call` is lost, so `call` should store it itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()  # Handlers are called in the main thread only.
    # The functions of `signal` convert to enumerations, which takes 20 times as long.
    handlers: dict[int, Any] = {
        number: handler
        for number in range(1, _signal.NSIG)
        if callable(handler := _signal.getsignal(number))
    }
    waiting: list[int] = []
    defers = True

    def on_signal(number: int, frame: Any) -> None:
        if defers:
            waiting.append(number)
            return
        # Another handler raised before this one was restored.
        restore(number)
        handlers[number](number, frame)

    def restore(number: int) -> None:
        if _signal.getsignal(number) is on_signal:  # `call` may have set another.
            _signal.signal(number, handlers[number])

    def deliver() -> None:
        while waiting:
            number = waiting.pop(0)
            try:
                handlers[number](number, sys._getframe())
            finally:  # A handler that raises does not prevent the others' calls.
                deliver()

    try:
        for number in handlers:
            _signal.signal(number, on_signal)
        return call()
    finally:
        defers = False
        try:
            for number in handlers:
                restore(number)
        finally:
            deliver()


_raised: list[int] = []
"""Interrupts within `reraising_interrupts`, which some code may have swallowed."""


def _on_interrupt(number: int, frame: Any) -> None:
    _raised.append(number)
    signal.default_int_handler(number, frame)


@contextlib.contextmanager
def reraising_interrupts() -> Iterator[None]:
    """While open, raise a `KeyboardInterrupt` again if a library swallows it.

    Destructors, callbacks of the garbage collector and of C libraries, and a bare
    `except` swallow it. `raise_swallowed`, before each step, raises it again; otherwise
    the end of the context does. A SIGINT handler of the user's own stays as it is.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _raised.clear()
    try:
        signal.signal(signal.SIGINT, _on_interrupt)
        yield
        if _raised:
            raise KeyboardInterrupt
    finally:
        if _signal.getsignal(signal.SIGINT) is _on_interrupt:
            _signal.signal(signal.SIGINT, signal.default_int_handler)
        _raised.clear()


def raise_swallowed() -> None:
    """Raise an interrupt that some code has swallowed; called before each step."""
    if not _raised or threading.get_ident() != threading.main_thread().ident:
        return
    _raised.clear()
    raise KeyboardInterrupt


def _user_frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        if not is_installed_file(trace.tb_frame.f_code.co_filename):
            frames.append(trace)
        trace = trace.tb_next
    return frames


def shortened(error: BaseException) -> BaseException:
    """Remove the frames of libraries from an exception's traceback.

    The place of an interrupt within a library is accidental.
    """
    below: TracebackType | None = None
    for trace in reversed(_user_frames(error.__traceback__)):
        trace.tb_next = below
        below = trace
    return error.with_traceback(below)


def described(error: KeyboardInterrupt, trace: TracebackType | None) -> str:
    """Describe an interrupt, with the user's line that it interrupted."""
    what = str(error) or "interrupted"
    users = _user_frames(trace)
    if users:
        code = users[-1].tb_frame.f_code
        what += f", at {code.co_filename}:{users[-1].tb_lineno} in {code.co_name}"
    return f"{what} (KeyboardInterrupt)"


def describe_interrupts() -> None:
    """Install an exception hook that prints an interrupt's place, not a traceback."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            print(f"replicax: {described(error, trace)}.", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook
