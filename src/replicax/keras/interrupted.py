"""What a call of a model shows of an interrupt: where it was, in the user's lines."""

from typing import Any

from keras.src.utils.traceback_utils import is_traceback_filtering_enabled

from replicax._util.interrupts import shortened
from replicax.cluster import workers
from replicax.keras.resume import FitSession

__all__ = ["briefly", "say_where"]


def briefly(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `original` on a model; an interrupt's traceback has no frames of libraries.

    Raises:
        KeyboardInterrupt: With the call that was interrupted as its message.
    """
    try:
        return original(model, *args, **kwargs)
    except KeyboardInterrupt as error:
        strategy = getattr(model, "_replicax_strategy", None)
        if strategy is None or not is_traceback_filtering_enabled():
            raise
        if not error.args:
            error.args = (f"interrupted in {original.__name__}",)
        raise shortened(error) from None


def say_where(error: KeyboardInterrupt, model: Any, session: FitSession) -> None:
    """Give an interrupt of `fit` the step that training is at as its message."""
    if not error.args:
        error.args = (f"interrupted in fit{_progress(model, session)}",)


def _progress(model: Any, session: FitSession) -> str:
    """How far training is, if that can be known without a wait for others."""
    members = workers.current()
    if members.watch is not None:
        return f" after step {members.watch.steps[members.name]}"
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    if session.claimed is not None or iterations is None:
        return ""
    return f" after step {int(iterations.numpy())}"
