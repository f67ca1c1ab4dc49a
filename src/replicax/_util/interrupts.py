"""Python's signal handlers, held back while a step may not be left half done.

A handler may raise, as that of Ctrl-C does, between any two instructions of Python. The
steps themselves are dispatched and stored by one call of C, which no handler comes
into; this is for the rare ones that take several instructions.
"""

import _signal
import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from replicax._util.user_code import is_installed_file

__all__ = [
    "describe_interrupts",
    "described",
    "heeding_interrupts",
    "postponing_interrupts",
    "raise_unheeded",
    "shortened",
    "take_up_postponed",
    "uninterrupted",
]

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


_NO_STEP_S = 20.0
"""How long a postponed interrupt waits without a step; a launcher waits 30 s."""

_SPEAKS_S = 1.0
_POSTPONED = (
    "replicax: interrupted; training is saved after the step, or the validation, that "
    "is under way. Interrupt again to end at once."
)


class _Pending:
    """The interrupts that have come during a call that heeds them.

    Attributes:
        numbers: Of those that were raised, and that some code may have swallowed, or
            that were postponed.
        request: What sees to it that a first one is raised later; None: nothing.
        moved_at: When a step began; None: none is postponed or it is raised by now.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.request: Callable[[], None] | None = None
        self.moved_at: float | None = None

    def note(self, number: int, frame: Any) -> None:
        """Take the place of Python's handler."""
        is_first = not self.numbers
        self.numbers.append(number)
        if is_first and self.request is not None:
            self.moved_at = time.monotonic()
            # A `Thread` takes locks, which the interrupted code may hold.
            _thread.start_new_thread(self._limit, ())
            self.request()
            return
        self.moved_at = None
        signal.default_int_handler(number, frame)

    def _limit(self) -> None:
        speaks_at = time.monotonic() + _SPEAKS_S
        while (moved_at := self.moved_at) is not None:
            now = time.monotonic()
            if now > moved_at + _NO_STEP_S:
                main = threading.main_thread().ident
                signal.pthread_kill(main or 0, signal.SIGINT)
                return
            if now > speaks_at:
                speaks_at = float("inf")
                print(_POSTPONED, file=sys.stderr, flush=True)
            time.sleep(0.1)

    def clear(self) -> None:
        """Begin a call, or end it."""
        self.numbers.clear()
        self.moved_at = None


_pending = _Pending()
_unheeded = _pending.numbers
_note = _pending.note


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[None]:
    """While open, one Ctrl-C is enough, even if some code swallows it.

    Destructors, callbacks of the garbage collector and of C libraries swallow the
    `KeyboardInterrupt`. `raise_unheeded`, at a step's beginning, raises it again then,
    and at the latest the end of the context does. A handler of the user's own is left
    alone.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    _pending.clear()
    try:
        signal.signal(signal.SIGINT, _note)
        yield
        if _unheeded:
            raise KeyboardInterrupt
    finally:
        if _signal.getsignal(signal.SIGINT) is _note:
            _signal.signal(signal.SIGINT, signal.default_int_handler)
        _pending.clear()


@contextlib.contextmanager
def postponing_interrupts(request: Callable[[], None]) -> Iterator[None]:
    """While open, a first Ctrl-C calls `request`; a second one is raised at once.

    Whoever asks for that raises `KeyboardInterrupt` after the step. If no step begins
    for 20 s, it is raised then. `request` is called in the handler, in any instruction
    of the main thread.
    """
    with heeding_interrupts():
        before, _pending.request = _pending.request, request
        try:
            yield
        finally:
            _pending.request = before


def take_up_postponed() -> None:
    """The step has ended: let what is done now, such as a save, take its time."""
    _pending.moved_at = None


def raise_unheeded() -> None:
    """Raise the `KeyboardInterrupt` that some code has swallowed, if one did."""
    if not _unheeded:
        return
    if _pending.moved_at is not None:
        _pending.moved_at = time.monotonic()
        return
    _unheeded.clear()
    raise KeyboardInterrupt


def _users(trace: TracebackType | None) -> list[TracebackType]:
    """The frames of a traceback that are the user's, and not of a library."""
    found = []
    while trace is not None:
        if not is_installed_file(trace.tb_frame.f_code.co_filename):
            found.append(trace)
        trace = trace.tb_next
    return found


def shortened(error: BaseException) -> BaseException:
    """An exception without the frames of libraries in its traceback.

    Where an interrupt happened to come within them says nothing.
    """
    below: TracebackType | None = None
    for trace in reversed(_users(error.__traceback__)):
        trace.tb_next = below
        below = trace
    return error.with_traceback(below)


def described(error: KeyboardInterrupt, trace: TracebackType | None) -> str:
    """What an interrupt interrupted, and the user's line that it was in."""
    what = str(error) or "interrupted"
    users = _users(trace)
    if users:
        code = users[-1].tb_frame.f_code
        what += f", at {code.co_filename}:{users[-1].tb_lineno} in {code.co_name}"
    return f"{what} (KeyboardInterrupt)"


def describe_interrupts() -> None:
    """Have an interrupt that ends this process say where, without a traceback."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            print(f"replicax: {described(error, trace)}.", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook
