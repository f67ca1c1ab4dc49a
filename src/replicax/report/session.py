"""Reports one training: writes epochs and the page, measures at the end."""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import jax
import keras
import msgspec
import numpy as np

from replicax._util.arguments import short
from replicax._util.files import write_whole
from replicax._util.waiting import wait_for
from replicax.cluster.failure import num_restarts
from replicax.engine.values import is_per_replica
from replicax.report import diagnosis
from replicax.report.journal import Journal
from replicax.report.page import page_of
from replicax.report.probes import memory_of, start_seconds, sum_seconds
from replicax.report.recorder import Recorder
from replicax.report.runs import (
    EpochRecord,
    FitBegin,
    FitEnd,
    WorkerRecord,
    merged,
    read_run,
)
from replicax.report.worker import ReportedWorker, facts_of, local_devices
from replicax.strategies.strategy import Strategy

__all__ = ["FitReport"]

_logger = logging.getLogger("replicax")

_PAGE_EVERY_S = 5.0
_PAGE_SHARE = 50  # Rendering takes at most 1/50 of the time.
_OTHERS_S = 3.0  # Longest wait for the records of other workers.
_MAX_ERROR_CHARS = 300

_next_pages: dict[Path, float] = {}
"""Earliest time of each page's next write, for all calls of `fit`."""

_num_fits: dict[Path, int] = {}
"""Number of trainings that this process has reported, by page."""


class FitReport:
    """Records one call of `fit`, or a custom loop without `model`, in this process.

    `params` is Keras' dict of `fit`'s arguments for callbacks. With `measures`, it
    measures communication and program starts after training; synchronous workers use
    the chief's value.
    """

    def __init__(
        self,
        page: Path,
        strategy: Strategy | None,
        model: keras.Model | None,
        params: Mapping[str, object],
        *,
        measures: bool,
    ) -> None:
        self.worker = worker = ReportedWorker(strategy)
        self.is_loop = model is None
        self.recorder = Recorder()
        self._page = page
        self._model = model
        self._devices = local_devices(worker.strategy)
        self._params = params
        self._fit_number = _num_fits[page] = _num_fits.get(page, 0) + 1
        self._keeps_earlier = self._fit_number > 1 or num_restarts() > 0
        self._measures = measures
        self._journal: Journal | None = None
        self._total: EpochRecord | None = None  # All finished epochs, merged.
        self._epoch = 0
        self._exchange_s = worker.exchange_s()
        self._staleness = worker.staleness()
        self._has_ended = False

    # Epochs.

    def begin_epoch(self, number: int) -> None:
        """Start the steps of an epoch."""
        if self._journal is None:
            self._journal = self._open(number)
            self._write_page()
        self._epoch = number
        self.recorder.begin_epoch()

    def end_epoch(self, logs: Mapping[str, object]) -> None:
        """End an epoch, after all callbacks."""
        wall_s = self.recorder.end_steps()
        exchange_s, staleness = self.worker.exchange_s(), self.worker.staleness()
        epoch = EpochRecord(
            number=self._epoch,
            logs=_numbers(logs),
            wall_s=wall_s,
            counts=dataclasses.asdict(self.recorder.tally),
            memory=memory_of(self._devices),
            exchange_s=max(0.0, exchange_s - self._exchange_s),
            staleness=staleness - self._staleness,
        )
        self._exchange_s, self._staleness = exchange_s, staleness
        self._total = epoch if self._total is None else merged([self._total, epoch])
        self._add(epoch)
        self._write_page()

    def end_loop_epoch(self, logs: Mapping[str, object]) -> None:
        """Implement `Report.end_epoch`."""
        if self._journal is None:
            return  # A plan.
        for name, value in logs.items():
            if is_per_replica(value) or not _numbers({name: value}):
                raise TypeError(
                    f"Report.end_epoch: logs[{name!r}] must be one number; got "
                    f"{short(value)}. Use strategy.reduce('mean', value) first."
                )
        if not self.recorder.tally.executions:
            raise RuntimeError(
                f"Report.end_epoch: epoch {self._epoch + 1} had no step. Pass batches "
                "of one distributed dataset to strategy.run or to a watched function."
            )
        self.end_epoch(logs)
        self.begin_epoch(self._epoch + 1)

    def end(self) -> str:
        """Measure, and write the last page; return the diagnosis, empty if none."""
        event = FitEnd(state="done")
        if self._measures and self._total:
            measured = self._measured()
            line = diagnosis.summary(measured) if self.worker.is_chief else ""
            shares = diagnosis.shares(measured)
            event = FitEnd(state="done", shares=shares, diagnosis=line)
        self._finish(event)
        return event.diagnosis

    def close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the last page after an error; has the signature of `__exit__`."""
        if self._has_ended or self._journal is None:
            return
        text = "the training did not end"
        if error is not None:
            text = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        place = f"(epoch {self._epoch + 1}, step {self.recorder.tally.steps})"
        self._finish(FitEnd(state="interrupted", error=f"{text} {place}"))

    def _finish(self, event: FitEnd) -> None:
        self._has_ended = True
        self._add(event)
        if self.worker.is_chief and self._journal is not None:
            if event.state == "done":
                self._await_others(
                    lambda worker: worker.fits[-1].end.state != "running"
                )
            self._write_page(now=True)

    def _add(self, event: msgspec.Struct) -> None:
        if self._journal is not None:
            self._journal.add(event)

    def _open(self, epoch: int) -> Journal:
        """Open the event log at the first epoch.

        A process that resumes at a later epoch appends to the earlier process' log.
        """
        worker = self.worker
        fresh = not self._keeps_earlier and epoch == 0
        journal = Journal(self._page, worker.index, fresh=fresh)
        if not self.is_loop:  # A loop measures nothing that workers must do together.
            self._measures = worker.measures_of_chief(self._measures)
        facts = facts_of(self._model, worker.strategy, self._params)
        begin = FitBegin(
            worker=worker.name,
            workers=worker.names,
            number=self._fit_number,
            counts_own=worker.servers is not None,
            # `default=str`: names of models and losses may have any type.
            facts=json.loads(json.dumps(facts, default=str)),
        )
        journal.add(begin)
        return journal

    # The page.

    def _write_page(self, *, now: bool = False) -> None:
        """Write the page, if this is the chief and the interval has passed."""
        began = time.monotonic()
        is_time = now or began >= _next_pages.get(self._page, 0.0)
        if not is_time or not self.worker.is_chief:
            return
        if self._journal is None or self._journal.has_failed:
            return
        try:
            write_whole(self._page, page_of(read_run(self._page)))
        except OSError as error:
            _logger.warning(
                "Report: %s cannot be written (%s). Training continues.",
                self._page,
                error,
            )
        duration_s = time.monotonic() - began
        _next_pages[self._page] = began + max(_PAGE_EVERY_S, _PAGE_SHARE * duration_s)

    def _await_others(
        self, is_done: Callable[[WorkerRecord], bool]
    ) -> list[WorkerRecord]:
        """Wait until all other workers are done, or 3 s; return their records."""
        others: list[WorkerRecord] = []

        def all_done() -> list[WorkerRecord] | None:
            try:
                run = read_run(self._page)
            except OSError as error:
                _logger.warning("Report: cannot read other workers' files: %s.", error)
                return []
            others[:] = [w for w in run.workers if w.name != self.worker.name]
            return others if all(map(is_done, others)) else None

        if len(self.worker.names) == 1:
            return []
        return wait_for(all_done, _OTHERS_S, late=lambda: others, pauses=(0.1, 0.1))

    # Measurements.

    def _measured(self) -> diagnosis.Measurements:
        """Measure the training; all synchronous workers must call this together."""
        assert self._total is not None
        assert self._model is not None
        total, strategy = self._total, self.worker.strategy
        executions = int(total.counts["executions"] - total.counts["first_executions"])
        start_s, sum_s = self._probed(executions)
        steps, wall = total.timed_steps, total.timed_s
        waits = total.counts["waits_s"], total.exchange_s
        # With overlap, exchanges and waits for other tasks happen at the same time.
        overlaps = getattr(strategy, "overlap", False)
        waits_s = max(waits) if overlaps else sum(waits)
        rate, input_share, input_worker = self._compare_workers(total)
        return diagnosis.Measurements(
            executions=executions,
            step_s=total.step_s,
            examples_per_s=rate,
            batch=total.counts["examples"] / max(1.0, total.counts["steps"]),
            num_replicas=1 if strategy is None else strategy.num_replicas_in_sync,
            kind=self._kind(),
            input=input_share,
            communication=(
                None if sum_s is None else _share(sum_s * steps + waits_s, wall)
            ),
            start=None if start_s is None else _share(start_s * executions, wall),
            steps_per_execution=self._model.steps_per_execution,
            can_compress=self.worker.can_compress,
            input_worker=input_worker,
        )

    def _probed(self, executions: int) -> tuple[float | None, float | None]:
        """Time a program start and a step's gradient sums; None: not measured."""
        if executions < diagnosis.FEWEST_EXECUTIONS and not self.worker.is_synchronous:
            return None, None  # Synchronous workers must measure together.
        strategy, model = self.worker.strategy, self._model
        assert model is not None
        group = None if strategy is None else strategy.group
        try:
            start_s = start_seconds(len(model.variables), group)
            if strategy is None:
                return start_s, 0.0
            return start_s, sum_seconds(strategy, model.trainable_variables)
        except jax.errors.JaxRuntimeError as error:  # Out of memory, for example.
            _logger.warning(
                "Report: communication and starts could not be measured (%s). The "
                "model is trained, and the report has everything else.",
                str(error)[:_MAX_ERROR_CHARS],
            )
            return None, None

    def _compare_workers(self, total: EpochRecord) -> tuple[float, float, str]:
        """Return the examples per second, the largest input share, and its worker."""

        def has_ended(worker: WorkerRecord) -> bool:
            epochs = worker.fits[-1].epochs
            return bool(epochs) and epochs[-1].number >= self._epoch

        others = self._await_others(has_ended) if self.worker.is_chief else []
        last_fits = {worker.name: worker.fits[-1].epochs for worker in others}
        totals = {name: merged(epochs) for name, epochs in last_fits.items() if epochs}
        totals[self.worker.name] = total
        shares = {name: epoch.input_share for name, epoch in totals.items()}
        shares = {name: x for name, x in shares.items() if math.isfinite(x)}
        input_worker = max(shares, key=lambda x: shares[x], default=self.worker.name)
        rate = total.examples_per_s
        if self.worker.servers is not None:
            rates = [epoch.examples_per_s for epoch in totals.values()]
            rate = sum(x for x in rates if math.isfinite(x))
        is_alone = len(self.worker.names) == 1
        share = shares.get(input_worker, 0.0)
        return rate, share, "" if is_alone else input_worker

    def _kind(self) -> diagnosis.Kind:
        strategy = self.worker.strategy
        if self.worker.servers is not None:
            return "servers"
        if strategy is None or strategy.num_replicas_in_sync == 1:
            return "alone"
        return "central" if strategy.group.updates_at_home else "replicas"


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _numbers(logs: Mapping[str, object]) -> dict[str, float]:
    """Select the logs that a curve can show: single numbers."""
    numbers = {}
    for name, value in logs.items():
        array = np.asarray(value)
        is_number = jax.numpy.issubdtype(array.dtype, np.number)  # Also bfloat16.
        if array.size == 1 and (is_number or array.dtype == bool):
            numbers[str(name)] = float(array.reshape(()))
    return numbers
