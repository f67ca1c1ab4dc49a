"""Defers signal handlers during critical sections; raises swallowed interrupts again.

A handler may raise, as that of Ctrl-C does, between any two instructions of Python.
Ordinary steps are dispatched and stored by one call of C, which no handler interrupts;
the critical sections are the rare steps that take several instructions.
"""

import _signal
import _thread
import contextlib
import functools
import inspect
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from replicax._util.user_code import is_installed_file, library_of

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
    """Call a function, and defer signal handlers until it returns.

    The handlers' exceptions are raised then. It takes about 10 us. If a handler raises,
    the result of `call` is lost, so `call` should store it itself.
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
    """Replaces this process' signal handlers, and queues the signals."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._waiting: list[int] = []
        self._holds = True

    def hold(self) -> None:
        """Replace the handlers."""
        # The functions of `signal` convert to enumerations, which takes 20 times as
        # long.
        for number in range(1, _signal.NSIG):
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._note)

    def release(self) -> None:
        """Restore the handlers, and call them for the queued signals."""
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
        # An already restored handler has raised before this one was restored.
        self._restore(number)
        self._handlers[number](number, frame)

    def _deliver(self) -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            try:
                self._handlers[number](number, sys._getframe())
            finally:  # A handler that raises does not prevent the others' calls.
                self._deliver()


_NO_STEP_S = 20.0
"""How long a postponed interrupt waits without a step; a launcher waits 30 s."""

_SPEAKS_S = 1.0
_POSTPONED = (
    "replicax: interrupted; training is saved after the step, or the validation, that "
    "is under way. Interrupt again to end at once."
)


class _Pending:
    """The interrupts during a call that heeds them.

    Attributes:
        numbers: Signals that were raised, and may have been swallowed, or that were
            postponed.
        request: Called for a first interrupt, which it raises later; None: interrupts
            are raised at once.
        moved_at: Start of the last step while an interrupt is postponed; else None.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.request: Callable[[], None] | None = None
        self.moved_at: float | None = None

    def note(self, number: int, frame: Any) -> None:
        """Handle an interrupt, in place of Python's handler."""
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
        """Reset at the begin and the end of a call."""
        self.numbers.clear()
        self.moved_at = None


_pending = _Pending()
_unheeded = _pending.numbers
_note = _pending.note


class _Heeded:
    """A signal handler of the user's that remembers what it raises."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        """Call the handler."""
        try:
            self.handler(number, frame)
        except BaseException as error:
            _raised.append(error)
            raise


_heeded: dict[int, _Heeded] = {}
"""The handlers in place of the user's, by signal, while a call heeds them."""

_raised: list[BaseException] = []
"""What they have raised during the call."""

_SENT = tuple(
    getattr(_signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "ALRM", "TERM", "USR1", "USR2", "XCPU")
)
"""The signals whose handlers are looked up before each step, in 1 us."""


def _heed_handlers(numbers: Iterable[int]) -> None:
    """Put handlers that remember what they raise in place of the user's.

    Those of installed packages stay: a package may compare its handler when it
    restores the one before.
    """
    for number in numbers:
        handler = _signal.getsignal(number)
        if not callable(handler) or isinstance(handler, _Heeded):
            continue
        function: Any = handler
        while isinstance(function, functools.partial):
            function = function.func
        if not inspect.isroutine(function):
            function = type(function).__call__
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None and not is_installed_file(code.co_filename):
            _heeded[number] = _Heeded(handler)
            _signal.signal(number, _heeded[number])


def _restore_handlers() -> None:
    while _heeded:
        number, heeded = _heeded.popitem()
        if _signal.getsignal(number) is heeded:  # The call may have set another.
            _signal.signal(number, heeded.handler)


def _swallowed() -> BaseException | None:
    """Take what a user's handler has raised and a library has swallowed, if anything.

    A traceback begins where its exception was caught. A bare `except` of Keras, or a
    callback of JAX's, may be interrupted; where the user's code catches an exception of
    its own handler, it is dealt with.
    """
    errors, _raised[:] = list(_raised), []
    for error in errors:
        trace = error.__traceback__
        if trace is None or library_of(trace.tb_frame.f_code.co_filename):
            return error
    return None


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[None]:
    """While open, raise an interrupt again if a library swallows it.

    An interrupt is a `KeyboardInterrupt` of Python's own handler, or what a handler of
    the user's raises. Destructors, callbacks of the garbage collector and of C
    libraries swallow it, and so does a bare `except`. `raise_unheeded`, at the next
    step's beginning, raises it again, or else the end of the context does. All handlers
    are the user's afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_inner = bool(_depth)
    _depth.append(None)
    try:
        _heed_handlers(range(1, _signal.NSIG))
        with _heeding_ctrl_c():
            yield
    except BaseException as error:
        known = any(error is x for x in _raised)
        if not known and (swallowed := _swallowed()) is not None:
            raise swallowed from error
        raise
    else:
        if (swallowed := _swallowed()) is not None:
            raise swallowed
    finally:
        _depth.pop()
        if not is_inner:
            _restore_handlers()
            _raised.clear()


_depth: list[None] = []
"""One entry for each open `heeding_interrupts`: `evaluate` is called within `fit`."""


@contextlib.contextmanager
def _heeding_ctrl_c() -> Iterator[None]:
    """Raise a swallowed `KeyboardInterrupt` again, unless the user has a handler."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
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

    The caller raises `KeyboardInterrupt` after the step. If no step begins for 20 s, it
    is raised then. The signal handler calls `request`, at any instruction of the main
    thread.
    """
    with heeding_interrupts():
        before, _pending.request = _pending.request, request
        try:
            yield
        finally:
            _pending.request = before


def take_up_postponed() -> None:
    """End the postponement: what follows, such as a save, has no time limit."""
    _pending.moved_at = None


def raise_unheeded() -> None:
    """Raise an interrupt that some code has swallowed; called before each step."""
    if not _depth or threading.get_ident() != threading.main_thread().ident:
        return
    _heed_handlers(_SENT)
    if _raised and (swallowed := _swallowed()) is not None:
        raise swallowed
    if not _unheeded:
        return
    if _pending.moved_at is not None:
        _pending.moved_at = time.monotonic()
        return
    _unheeded.clear()
    raise KeyboardInterrupt


def _users(trace: TracebackType | None) -> list[TracebackType]:
    """List the frames of a traceback in the user's code."""
    found = []
    while trace is not None:
        if not is_installed_file(trace.tb_frame.f_code.co_filename):
            found.append(trace)
        trace = trace.tb_next
    return found


def shortened(error: BaseException) -> BaseException:
    """Remove the frames of libraries from an exception's traceback.

    The place of an interrupt within a library is accidental.
    """
    below: TracebackType | None = None
    for trace in reversed(_users(error.__traceback__)):
        trace.tb_next = below
        below = trace
    return error.with_traceback(below)


def described(error: KeyboardInterrupt, trace: TracebackType | None) -> str:
    """Describe an interrupt, with the user's line that it interrupted."""
    what = str(error) or "interrupted"
    users = _users(trace)
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
