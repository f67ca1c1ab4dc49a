"""What a call of a model shows of an interrupt: where it was, in the user's lines."""

import keras

from replicax._util.interrupts import shortened
from replicax.cluster import workers
from replicax.keras.session import FitSession

__all__ = ["say_where", "shown"]


def shown(error: BaseException, name: str) -> BaseException | None:
    """An interrupt as a call of a model raises it: without frames of libraries.

    Args:
        error: What the call ended with.
        name: Of the method, such as `"fit"`.

    Returns:
        The interrupt, with the call that it came in as its message; None: it is none,
        or all frames are to be shown.
    """
    found = _interrupt_of(error)
    if found is None or not keras.config.is_traceback_filtering_enabled():
        return None
    if not found.args:
        found.args = (f"interrupted in {name}",)
    return shortened(found)


def _interrupt_of(error: BaseException) -> KeyboardInterrupt | None:
    """The interrupt that an exception is, or that Keras has made a `TypeError` of.

    It may come before the first line of a function, where a frame has no line number,
    and Keras' filter of tracebacks fails.
    """
    if isinstance(error, KeyboardInterrupt):
        return error
    context = error.__context__
    return context if isinstance(context, KeyboardInterrupt) else None


def say_where(
    error: KeyboardInterrupt, model: keras.Model, session: FitSession
) -> None:
    """Give an interrupt of `fit` the step that training is at as its message."""
    if not error.args:
        error.args = (f"interrupted in fit{_progress(model, session)}",)


def _progress(model: keras.Model, session: FitSession) -> str:
    """How far training is, if that can be known without a wait for others."""
    members = workers.current()
    if members.watch is not None:
        return f" after step {members.watch.steps[members.name]}"
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    if session.work is not None or iterations is None:
        return ""
    return f" after step {int(iterations.numpy())}"
