"""Calls of a model from several threads: they queue, or read a snapshot during `fit`.

Each call holds the model's lock. During a `fit`, calls of other threads do not wait for
the lock, but use a snapshot of the model's weights and metrics, so that neither call
changes the results of the other.
"""

import contextlib
import threading
from collections.abc import Generator

import keras

from replicax._util.waiting import wait_for
from replicax.engine.protocols import StrategyLike
from replicax.engine.threads import VariableSnapshot
from replicax.errors import ContextError
from replicax.keras.session import session_of

__all__ = ["turn_of"]

_MAX_WAIT_S = 3600.0
_TURN = "_replicax_turn"


class _Turn:
    """A model's lock, and the calls of the thread that holds it, outermost first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.calls: list[str] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy as a new lock: a copy of the model has a lock of its own."""
        return (_Turn, ())

    def take(self, model: keras.Model, name: str) -> bool:
        """Wait for the lock; False if a `fit` of another thread holds it."""

        def poll() -> bool | None:
            fit = session_of(model)
            if fit is not None and fit.is_built:
                return False
            return self.lock.acquire(timeout=0.05) or None

        def reminder(waited: float) -> str:
            return (
                f"{name} of model {model.name!r} in thread "
                f"{threading.current_thread().name!r} has waited {waited:.0f} s for "
                f"{' > '.join(self.calls)}"
            )

        def late() -> bool:
            raise TimeoutError(
                f"{reminder(_MAX_WAIT_S)}. Call the model in one thread."
            )

        if self.lock.acquire(blocking=False):
            return True
        return wait_for(poll, _MAX_WAIT_S, late=late, reminder=reminder)


@contextlib.contextmanager
def turn_of(model: keras.Model, strategy: StrategyLike, name: str) -> Generator[None]:
    """While open, no other thread's call of the model writes its variables.

    Raises:
        ContextError: For a call that trains while another thread is in `fit`.
        NotImplementedError: For any call during such a `fit`, if other processes take
            part in it.
        TimeoutError: If another thread's call does not end in an hour.
    """
    turn: _Turn = model.__dict__.setdefault(_TURN, _Turn())
    if not turn.take(model, name):
        _refuse(model, strategy, name, turn.calls[0])
        with VariableSnapshot([*model.variables, *model.metrics_variables]):
            yield
    elif name == "predict_on_batch":  # It writes nothing: needs no lock.
        turn.lock.release()
        yield
    else:
        turn.calls.append(f"{name} in thread {threading.current_thread().name!r}")
        try:
            yield
        finally:
            turn.calls.pop()
            turn.lock.release()


def _refuse(model: keras.Model, strategy: StrategyLike, name: str, other: str) -> None:
    what = (
        f"{name}: called of model {model.name!r} in thread "
        f"{threading.current_thread().name!r}, during {other}"
    )
    if name in ("fit", "train_on_batch"):
        raise ContextError(
            f"{what}. One thread at a time trains a model: call it when that fit has "
            "ended, or train a copy of the model (keras.models.clone_model)."
        )
    if len(strategy.workers.names) > 1 or not strategy.home.keeps_slots:
        raise NotImplementedError(
            f"{what}. Other processes of {strategy!r} take part in it, and have to "
            "make the same calls in the same order. Give fit validation_data, or call "
            f"{name} in a callback, in the thread of fit."
        )
