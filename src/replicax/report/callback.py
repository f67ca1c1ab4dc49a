"""The Keras callback `Report`, which writes the page of a training."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from replicax.cluster.failure import num_restarts
from replicax.keras import providers
from replicax.keras.hooks import install
from replicax.keras.session import LateCallback, session_of

if TYPE_CHECKING:
    from replicax.report.session import FitReport

__all__ = ["Report", "report_every_fit", "with_report"]

_num_fits: dict[Path, int] = {}
"""Number of calls of `fit` that this process has reported, by page."""

Logs = Mapping[str, object] | None


class Report(LateCallback):
    """Writes an HTML page about a run of `fit`, during the run and at its end.

    The page is one self-contained file. It shows losses and metrics, throughput, each
    worker's step time, input wait and memory, the staleness of gradients on parameter
    servers, configuration and versions. Workers write their numbers into a folder
    beside it, `<path>.d`; the chief renders the page. In a cluster, pass the callback
    on all workers, with a path in a shared folder. Several calls of `fit` with the same
    path share a page.
    (Keras: `keras.callbacks.TensorBoard` shows similar curves.)

    Args:
        path: The page's file, such as `"report.html"`; `~` is the home folder. Missing
            folders are created.
        diagnosis: Whether to measure communication and program starts after training,
            and to print a line with examples per second, the parts of a step's time,
            and the first thing to change. All workers use the chief's value. None:
            only if `verbose` is not 0.

    Raises:
        ValueError: If `path` is a folder, or names no file.

    Example:
        >>> import os, tempfile
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> page = os.path.join(tempfile.mkdtemp(), "report.html")
        >>> x = np.ones((8, 2))
        >>> _ = model.fit(x, x[:, :1], callbacks=[Report(page)], verbose=0)
        >>> os.path.exists(page)
        True
    """

    def __init__(
        self, path: str | os.PathLike[str], *, diagnosis: bool | None = None
    ) -> None:
        super().__init__()
        self.path = Path(path).expanduser()
        # Absolute: the script may change its working directory later.
        self._page = self.path.absolute()
        self.diagnosis = diagnosis
        if not self.path.name or self.path.is_dir():
            raise ValueError(
                f"Report: path must be a file's name, such as 'report.html'; got "
                f"{os.fspath(path)!r}, which is a folder."
            )
        self._run: FitReport | None = None
        self._logs: Logs = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Start recording.

        Raises:
            RuntimeError: If it is called outside of `fit`.
            ValueError: If this `fit` has another `Report`.
        """
        model: Any = self.model
        session = session_of(model)
        if session is None:
            raise RuntimeError(
                "Report: called outside of fit. Pass it to fit(callbacks=[...])."
            )
        if session.strategy.runner.is_dry:
            return  # A plan trains nothing and must not overwrite an existing page.
        if session.recorder is not None:
            raise ValueError(
                "Report: this fit already has a Report; got a second one for "
                f"{os.fspath(self.path)!r}. Pass one."
            )
        # Imported late: scripts without a report do not load the rendering modules.
        from replicax.report.session import FitReport

        page = self._page
        params = self.params or {}
        is_verbose = params.get("verbose", 1) != 0
        number = _num_fits.get(page, 0)
        self._run = run = FitReport(
            page,
            model,
            params,
            number=number + 1,
            keeps_earlier=number > 0 or num_restarts() > 0,
            measures=is_verbose if self.diagnosis is None else self.diagnosis,
        )
        _num_fits[page] = number + 1
        session.push(run.close)
        session.record_with(run.recorder)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Reset the counts; the first epoch opens the event log."""
        if self._run is not None:
            self._run.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Keep the logs, to which later callbacks may add values."""
        self._logs = logs

    def after_epoch_end(self, epoch: int) -> None:
        """Write the epoch's logs, with the values from other callbacks."""
        if self._run is not None:
            self._run.end_epoch(self._logs or {})

    def on_train_end(self, logs: Logs = None) -> None:
        """Measure, write the last page, and print the diagnosis."""
        run, self._run = self._run, None
        if run is None:
            return
        line = run.end()
        if line:
            print(f"{self.path}: {line}", flush=True)


def report_every_fit(page: str) -> None:
    """Report every `fit` of this process, also of models without a strategy.

    Args:
        page: The page of all reports.
    """
    providers.add_callbacks = functools.partial(with_report, page=page)
    install()


def with_report(callbacks: object, page: str) -> object:
    """Add a `Report` to `fit`'s callbacks, unless there is one."""
    report = Report(page, diagnosis=True)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if not any(isinstance(c, Report) for c in callbacks.callbacks):
            report.set_model(callbacks.model)
            report.set_params(callbacks.params)
            callbacks.callbacks.append(report)
        return callbacks
    own = [] if callbacks is None else keras.tree.flatten(callbacks)
    return own if any(isinstance(c, Report) for c in own) else [*own, report]
