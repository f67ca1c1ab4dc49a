"""Callbacks on several workers: the chief alone keeps files and sends to trackers."""

import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import keras

from replicax._util.types import PyTree
from replicax.cluster.failure import REPORT_DIR
from replicax.engine.protocols import StrategyLike
from replicax.engine.scope import current_call
from replicax.keras.session import LateCallback

__all__ = ["on_chief", "only_on_chief"]

_logger = logging.getLogger("replicax")

Callback = TypeVar("Callback", bound=keras.callbacks.Callback)

_MARK = "_replicax_on_chief"

_PATHS: dict[type[keras.callbacks.Callback], str] = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
}
"""The attribute with the path of the file or folder that a callback writes."""

_TRACKERS = frozenset(
    {
        "aim",
        "comet_ml",
        "dvclive",
        "mlflow",
        "neptune",
        "neptune_tensorflow_keras",
        "swanlab",
        "wandb",
    }
)
"""Packages whose callbacks send to an experiment tracker. None is imported here."""

_HAS_RUN: Mapping[str, Callable[[Any], bool]] = {
    "mlflow": lambda mlflow: mlflow.active_run() is not None,
    "wandb": lambda wandb: wandb.run is not None and not wandb.run.disabled,
}
"""Whether a package, once imported, has an active run in this process."""

_METHODS = [x for x in dir(LateCallback) if x.startswith(("on_", "set_", "after_"))]

_FOR_CHIEF = {*keras.callbacks.LambdaCallback.__mro__, keras.callbacks.RemoteMonitor}
"""The classes of Keras whose instances need not run on all workers."""


def on_chief(callback: Callback) -> Callback:
    """Make `fit`, `evaluate` and `predict` call a callback on the chief only.

    For callbacks that log to an experiment tracker or a file. On other workers no
    method of the callback runs. Callbacks of W&B, MLflow and other known trackers need
    no `on_chief`, and neither do the callbacks of Keras and replicax.

    The callback must not read sharded weights, call the model, or change the training:
    all workers take part in these.

    Args:
        callback: A callback; pass it on all workers.

    Returns:
        The same callback, marked.

    Raises:
        TypeError: If it is not a Keras callback.
        ValueError: If it is a callback of Keras or replicax that all workers must run.

    Example:
        >>> import keras, numpy as np
        >>> def log(epoch, logs):
        ...     print("epoch", epoch, sorted(logs))
        >>> logger = on_chief(keras.callbacks.LambdaCallback(on_epoch_end=log))
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((8, 2))
        >>> _ = model.fit(x, x[:, :1], callbacks=[logger], verbose=0)
        epoch 0 ['loss']
    """
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(
            "on_chief: expected an instance of keras.callbacks.Callback; got "
            f"{callback!r}. Where only the chief can make it, pass "
            "callbacks=[...] if strategy.is_chief else [] to fit."
        )
    for kind in type(callback).__mro__:
        if kind not in _FOR_CHIEF and _package(kind) in ("keras", "replicax"):
            raise ValueError(
                f"on_chief: {callback!r} is a {kind.__name__} of {_package(kind)}, "
                "which all workers must run. Pass it without on_chief: if it writes "
                "files, the chief alone keeps them."
            )
    setattr(callback, _MARK, True)
    return callback


@contextmanager
def only_on_chief(callbacks: PyTree, strategy: StrategyLike) -> Generator[None]:
    """On a worker other than the chief, mute callbacks that only log.

    Callbacks that write files still run, since all workers must take part when a
    callback reads sharded weights. Their files go to a folder that is deleted at the
    end: all workers have the same paths, and two that write one file damage it.
    """
    with ExitStack() as stack:
        if not strategy.is_chief:
            listed = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
            for callback in listed:
                if getattr(callback, _MARK, False) or _is_tracker(callback):
                    _warn_of_own_run(callback)
                    _mute(callback, stack)
            _discard_files(listed, stack)
        yield


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_tracker(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback is a known one that only logs.

    A subclass in the user's code is not: it may call the model, as subclasses of
    `WandbEvalCallback` do. Callbacks that save the model run on all workers.
    """
    if isinstance(callback, keras.callbacks.RemoteMonitor):
        return True
    is_saver = isinstance(callback, tuple(_PATHS))
    return _package(type(callback)) in _TRACKERS and not is_saver


def _warn_of_own_run(callback: keras.callbacks.Callback) -> None:
    name, kind = _package(type(callback)), type(callback).__name__
    if name in _HAS_RUN and _HAS_RUN[name](sys.modules[name]):
        _logger.warning(
            "%s: this worker has an active run of %s, in which %s logs nothing, since "
            "it runs on the chief only. Start the run (or autologging) only if "
            "strategy.is_chief%s.",
            current_call(),
            name,
            kind,
            ", and on others wandb.init(mode='disabled')" if name == "wandb" else "",
        )


def _mute(callback: keras.callbacks.Callback, stack: ExitStack) -> None:
    """Until the stack exits, replace a callback's methods by ones that do nothing."""
    attributes, silent = vars(callback), LateCallback()
    for name in _METHODS:
        if name in attributes:  # `LambdaCallback` sets some.
            stack.callback(attributes.__setitem__, name, attributes[name])
        else:
            stack.callback(attributes.pop, name)
        attributes[name] = getattr(silent, name)


def _discard_files(callbacks: list[PyTree], stack: ExitStack) -> None:
    """Until the stack exits, redirect files of callbacks to a temporary folder."""
    # The launcher deletes this folder if the process is killed.
    parent = os.environ.get(REPORT_DIR)
    folder = ""
    for number, callback in enumerate(callbacks):
        for name in (x for kind, x in _PATHS.items() if isinstance(callback, kind)):
            folder = folder or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="replicax-", dir=parent)
            )
            path = getattr(callback, name)
            stack.callback(setattr, callback, name, path)
            own = Path(folder, str(number))
            own.mkdir()
            # With 0 for each `{field}`, the callback overwrites one file.
            setattr(callback, name, str(own / re.sub(r"\{.*?\}", "0", Path(path).name)))
