"""`Report`, which writes the page of a training: a callback, and for custom loops."""

import contextlib
import functools
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from replicax._util.arguments import require_count, require_path
from replicax._util.types import Logs
from replicax.engine.scope import current_call
from replicax.errors import ContextError
from replicax.keras import providers
from replicax.keras.hooks import install
from replicax.keras.session import LateCallback, session_of

if TYPE_CHECKING:
    from replicax.report.session import FitReport
    from replicax.strategies.strategy import Strategy

__all__ = ["Report", "report_every_fit", "with_report"]


class Report(LateCallback):
    """Writes an HTML page about a training, during the training and at its end.

    A callback of `fit`; for a custom loop see `recording`. The page is one
    self-contained file. It shows losses and metrics, throughput, each worker's step
    time, input wait and memory, the staleness of gradients on parameter servers,
    configuration and versions. Workers write their numbers into a folder beside it,
    `<path>.d`; the chief renders the page. In a cluster, pass the callback on all
    workers, with a path in a shared folder. Several trainings with the same path share
    a page.
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
        require_path(path, "Report: path")
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
        self._logs: Logs | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
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
        if session.recorder or session.strategy.input_shard.recorder:
            raise ValueError(
                "Report: this fit, or the loop around it, already has a Report; got a "
                f"second one for {os.fspath(self.path)!r}. Pass one."
            )
        # Imported late: scripts without a report do not load the rendering modules.
        from replicax.report.session import FitReport

        params = self.params or {}
        is_verbose = params.get("verbose", 1) != 0
        self._run = run = FitReport(
            self._page,
            getattr(model, "_replicax_strategy", None),
            model,
            params,
            measures=is_verbose if self.diagnosis is None else self.diagnosis,
        )
        session.push(run.close)
        session.record_with(run.recorder)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Reset the counts; the first epoch opens the event log."""
        if self._run is not None:
            self._run.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Keep the logs, to which later callbacks may add values."""
        self._logs = logs

    def after_epoch_end(self, epoch: int) -> None:
        """Write the epoch's logs, with the values from other callbacks."""
        if self._run is not None:
            self._run.end_epoch(self._logs or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Measure, write the last page, and print the diagnosis."""
        run, self._run = self._run, None
        if run is None:
            return
        line = run.end()
        if line:
            print(f"{self.path}: {line}", flush=True)

    @contextlib.contextmanager
    def recording(
        self, strategy: "Strategy", *, initial_epoch: int = 0
    ) -> Generator[None]:
        """Record the custom loop in a `with` block, as one training on the page.

        The steps are the batches of the first distributed dataset that the block reads.
        Pass each to `strategy.run` or to a function of `strategy.watch`. Other datasets
        are not counted, and communication is not measured. With several workers,
        record on all of them.

        Args:
            strategy: The strategy of the loop.
            initial_epoch: The index of the first epoch, in a loop that is resumed.

        Raises:
            ContextError: Inside `fit`, or in another recording.
            ValueError: For `rx.ParameterServerStrategy`, or a negative `initial_epoch`.

        Example:
            >>> import os, tempfile, numpy as np, replicax as rx
            >>> strategy = rx.MirroredStrategy(["cpu:0"], replicas_per_device=2)
            >>> x = np.arange(8, dtype="float32")
            >>> dataset = strategy.experimental_distribute_dataset(x, batch_size=4)
            >>> report = Report(os.path.join(tempfile.mkdtemp(), "report.html"))
            >>> with report.recording(strategy):
            ...     for batch in dataset:
            ...         sums = strategy.run(lambda x: x.sum(), args=(batch,))
            ...     report.end_epoch({"sum": strategy.reduce("sum", sums)})
        """
        from replicax.report.session import FitReport

        require_count(initial_epoch, "Report.recording: initial_epoch", 0)
        if hasattr(strategy, "session"):  # With parameter servers.
            raise ValueError(
                f"Report.recording: cannot record a loop of {type(strategy).__name__}. "
                "Use fit(callbacks=[report])."
            )
        shard = strategy.input_shard
        is_open = shard.recorder or (self._run and self._run.is_loop)
        if is_open or current_call() != "run":
            outer = "another recording" if is_open else "fit"
            raise ContextError(
                f"Report.recording: {os.fspath(self.path)!r} cannot record inside "
                f"{outer}. End it first, or pass fit(callbacks=[report])."
            )
        self._run = run = FitReport(self._page, strategy, None, {}, measures=False)
        try:
            if not strategy.runner.is_dry:  # A plan trains nothing.
                run.begin_epoch(initial_epoch)
                shard.recorder = run.recorder
            yield
            if run.recorder.tally.executions:  # The loop did not end this epoch.
                run.end_epoch({})
            run.end()
        except BaseException as error:
            run.close(type(error), error, None)
            raise
        finally:
            shard.recorder = self._run = None

    def end_epoch(self, logs: Logs | None = None) -> None:
        """End an epoch of a loop in `recording`; the host waits for its last step.

        Args:
            logs: Losses and metrics by name, each one number. The page shows those of
                the chief.

        Raises:
            ContextError: Outside of `recording`.
            RuntimeError: If the epoch had no step.
            TypeError: If a log is not one number.
        """
        if self._run is None or not self._run.is_loop:
            raise ContextError(
                "Report.end_epoch: called outside of recording. Call it in the block "
                "of with report.recording(strategy)."
            )
        self._run.end_loop_epoch(logs or {})


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
