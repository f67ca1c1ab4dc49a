"""The state of a `fit`: the model, the position in the data, and the callbacks."""

from collections.abc import Sequence

import keras
import numpy as np

from replicax._private import keras as internals
from replicax._private import trainer
from replicax._util.types import PyTree
from replicax.checkpoint.checkpoint import Checkpoint
from replicax.checkpoint.entries import state_accessors
from replicax.checkpoint.restore import RestoreStatus
from replicax.checkpoint.storage import Contents

__all__ = ["CallbackState", "FitState", "capture_callbacks", "restore_callbacks"]

CallbackState = dict[str, PyTree]
"""The class of a callback, and its state as JSON and arrays."""


class FitState(Checkpoint):
    """The state from which `fit` resumes.

    Attributes:
        seeds: Keras' global seed generator, if there is one.
        progress: The position in the data and the state of the callbacks, as JSON.
        best_weights: The weights that callbacks keep, by the callback's index.
    """

    seeds: list[keras.random.SeedGenerator]
    progress: str
    best_weights: dict[str, list[np.ndarray]]

    def __init__(self, model: keras.Model) -> None:
        super().__init__(
            model=model,
            metrics=list(model.metrics_variables),
            seeds=[],
            progress="",
            best_weights={},
        )

    def contents(self) -> Contents | None:
        """Copy the state to the host, as in `Checkpoint.contents`."""
        generator = internals.shared_seed_generator(make=False)
        self.seeds = [] if generator is None else [generator]
        return super().contents()

    def apply(self, contents: Contents, path: str) -> RestoreStatus:
        """Restore the state; raise unless checkpoint and model have the same names."""
        if any(name.startswith("seeds/") for name in contents.arrays):
            self.seeds = [internals.shared_seed_generator(make=True)]
        # Only the checkpoint knows how many weights each callback kept.
        self.best_weights = {}
        for name, array in contents.arrays.items():
            if name.startswith("best_weights/"):
                weights = self.best_weights.setdefault(name.split("/")[1], [])
                weights.append(np.empty(array.shape, array.dtype))
        status = super().apply(contents, path)
        status.assert_consumed()
        return status


def capture_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
) -> tuple[list[CallbackState], dict[str, list[np.ndarray]]]:
    """Return the callbacks' states, and the best weights by the callback's index."""
    best_weights = {
        str(i): weights
        for i, callback in enumerate(callbacks)
        if (weights := getattr(callback, "best_weights", None)) is not None
    }
    return [_state_of(callback) for callback in callbacks], best_weights


def restore_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
    states: Sequence[CallbackState],
    best_weights: dict[str, list[np.ndarray]],
) -> list[str]:
    """Restore callbacks: the n-th callback of a class gets the class' n-th state.

    Returns:
        The classes of states for which there is no callback.
    """
    by_class: dict[str, list[keras.callbacks.Callback]] = {}
    for callback in callbacks:
        by_class.setdefault(type(callback).__name__, []).append(callback)
    missing = []
    for i, state in enumerate(states):
        candidates = by_class.get(state["class"], [])
        if candidates:
            _restore(candidates.pop(0), state, best_weights.get(str(i)))
        elif state["attributes"] or "own" in state:
            missing.append(state["class"])
    return missing


def _restore(
    callback: keras.callbacks.Callback,
    state: CallbackState,
    best_weights: list[np.ndarray] | None,
) -> None:
    if "own" in state and (accessors := state_accessors(callback)):
        accessors[1](state["own"])
    attributes = dict(state["attributes"])
    if best_weights is not None:
        attributes["best_weights"] = best_weights
    for name, value in attributes.items():
        setattr(callback, name, value)


def _state_of(callback: keras.callbacks.Callback) -> CallbackState:
    """Read a callback's state: the attributes of Keras' class, and `get_state`."""
    names = next(
        (
            trainer.CALLBACK_STATE[kind.__name__]
            for kind in type(callback).__mro__
            if kind.__name__ in trainer.CALLBACK_STATE
            and kind.__module__.startswith("keras.")
        ),
        (),
    )
    state: CallbackState = {
        "class": type(callback).__name__,
        "attributes": {
            name: getattr(callback, name) for name in names if hasattr(callback, name)
        },
    }
    if accessors := state_accessors(callback):
        state["own"] = accessors[0]()
    return state
