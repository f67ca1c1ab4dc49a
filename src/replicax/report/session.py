"""One call of `fit` that is reported: what is noted, written, measured at the end."""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from replicax.errors import ClusterError
from replicax.report import diagnosis
from replicax.report.facts import facts_of, local_devices
from replicax.report.journal import Journal, write_whole
from replicax.report.memory import memory_of
from replicax.report.page import page_of
from replicax.report.probes import start_seconds, sum_seconds
from replicax.report.recorder import Recorder
from replicax.report.runs import Epoch, read_epoch, read_run, together

__all__ = ["FitReport", "Task"]

_logger = logging.getLogger("replicax")

_PAGE_EVERY_S = 5.0
_PAGE_SHARE = 50  # At most one part in so many of the time goes into the page.
_OTHERS_S = 3.0
_MEET_S = 10.0
_LONGEST_ERROR = 300


class Task:
    """Which worker this process is, and how it meets the others.

    Args:
        strategy: Of the model; None: there is none.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.served = getattr(strategy, "session", None)
        if self.served is not None:
            self.names, self.index = tuple(self.served.workers), self.served.index
        elif strategy is not None:
            self.names = tuple(strategy.workers.names)
            self.index = strategy.workers.index
        else:
            self.names, self.index = ("worker:0",), 0

    @property
    def name(self) -> str:
        """This worker."""
        return self.names[self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this worker makes the page."""
        return self.index == 0

    @property
    def is_in_step(self) -> bool:
        """Whether other workers make the same steps."""
        return self.served is None and len(self.names) > 1

    def wants(self, diagnosis_wanted: bool) -> bool:
        """Whether to measure after training: the chief decides, as all have to.

        Waits for the others, which begin `fit` now, too.
        """
        if not self.is_in_step:
            return diagnosis_wanted
        answers = self._exchange(diagnosis_wanted)
        # One that came late finds all answers, and has to know who gave up on it.
        agreed = self._exchange(answers is not None)
        return answers is not None and bool(answers[0]) and all(agreed or [False])

    def _exchange(self, value: bool) -> list[Any] | None:
        try:
            return self.strategy.workers.exchange(
                "the training report", value, timeout_seconds=_MEET_S
            )
        except ClusterError as error:
            _logger.warning(
                "Report: communication will not be measured, as all workers would have "
                "to take part. Pass the callback on all of them. (%s)",
                error,
            )
            return None

    def exchange_s(self) -> float:
        """How long exchanges with the slowest server have taken until now."""
        return 0.0 if self.served is None else max(self.served.exchange_s)

    def staleness(self) -> Counter[int]:
        """Updates of this worker until now, by how stale they were."""
        return Counter() if self.served is None else Counter(self.served.staleness)


class FitReport:
    """One call of `fit`, of which this process' part is written down.

    Args:
        page: The page's file.
        model: What is trained.
        params: What Keras tells callbacks.
        number: Which call of `fit` of this process it is, for this page.
        is_known: Whether earlier calls of `fit` are in the page already.
        wants_diagnosis: Whether to measure at the end, as far as this worker knows.
    """

    def __init__(
        self,
        page: Path,
        model: Any,
        params: Mapping[str, Any],
        *,
        number: int,
        is_known: bool,
        wants_diagnosis: bool,
    ) -> None:
        self.task = task = Task(getattr(model, "_replicax_strategy", None))
        self.recorder = Recorder(on_mark=self._mark)
        self._page = page
        self._model = model
        self._devices = local_devices(task.strategy)
        self._params = params
        self._is_known = is_known
        self._fit_number = number
        self._measures = wants_diagnosis
        self._opened: Journal | None = None
        self._epochs: list[Epoch] = []
        self._number = 0
        self._logs: Mapping[str, Any] = {}
        self._exchange_s = task.exchange_s()
        self._staleness = task.staleness()
        self._has_ended = False
        self._next_page = 0.0

    # Epochs, as Keras tells them.

    def begin_epoch(self, number: int) -> None:
        """The steps of an epoch begin.

        Raises:
            OSError: If the page's folder cannot be made or written to.
        """
        if self._opened is None:
            self._opened = self._open(number)
            self._write_page()
        self._number = number
        self.recorder.begin_epoch()

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """An epoch has ended, and all callbacks were told."""
        steps_s = self.recorder.end_steps()
        # With what else Keras and other callbacks did.
        after_s = max(0.0, self.recorder.elapsed_s() - steps_s)
        event = self._event("epoch", steps_s, logs)
        exchange_s, staleness = self.task.exchange_s(), self.task.staleness()
        event |= {
            "after_s": after_s,
            "exchange_s": max(0.0, exchange_s - self._exchange_s),
            "staleness": {str(k): n for k, n in (staleness - self._staleness).items()},
        }
        self._exchange_s, self._staleness = exchange_s, staleness
        self._epochs.append(read_epoch(event))
        self._journal.add(event)
        self._write_page()

    def end(self) -> str:
        """`fit` is over; returns the diagnosis, "" where there is none."""
        if self._opened is None:
            self._has_ended = True
            return ""
        event: dict[str, Any] = {"event": "end", "time": time.time(), "state": "done"}
        measured = self._measured() if self._measures and self._epochs else None
        line = ""
        if measured is not None and self.task.is_chief:
            line = diagnosis.summary(measured)
            event |= {"diagnosis": line}
        if measured is not None:
            event |= {"shares": diagnosis.shares(measured)}
        self._finish(event)
        return line

    def close(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """The end of `fit` in any way; an `__exit__`."""
        if self._has_ended or self._opened is None:
            return
        text = "fit did not end"
        if error is not None:
            text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        self._finish(
            {"event": "end", "time": time.time(), "state": "interrupted", "error": text}
        )

    def _finish(self, event: Mapping[str, Any]) -> None:
        self._has_ended = True
        self._journal.add(event)
        if self.task.is_chief:
            if event["state"] == "done":
                self._await_others()
            self._write_page(now=True)

    def _mark(self) -> None:
        """Amid an epoch: tell that training goes on."""
        self._journal.add(self._event("progress", self.recorder.elapsed_s(), {}))
        self._write_page()

    def _event(
        self, kind: str, wall_s: float, logs: Mapping[str, Any]
    ) -> dict[str, Any]:
        tally = self.recorder.tally
        counts = {name: getattr(tally, name) for name in tally.__slots__}
        return {
            "event": kind,
            "time": time.time(),
            "epoch": self._number,
            "logs": _numbers(logs),
            "wall_s": wall_s,
            "counts": counts,
            "memory": memory_of(self._devices),
        }

    def _open(self, epoch: int) -> Journal:
        """Begin to write, now that it is known in which epoch.

        A process that goes on in a later epoch keeps what the one before has written.
        """
        task = self.task
        fresh = not self._is_known and epoch == 0
        journal = Journal(self._page, task.index, fresh=fresh, clears=task.is_chief)
        # After older files are gone, and before others write theirs.
        self._measures = task.wants(self._measures)
        facts = {
            "worker": task.name,
            "workers": list(task.names),
            "examples_of": "all" if task.served is None else "own",
            "fit": self._fit_number,
            **facts_of(self._model, task.strategy, self._params),
        }
        # What a user names may be of any type.
        facts = json.loads(json.dumps(facts, default=str))
        journal.begin({"event": "begin", "time": time.time(), "facts": facts})
        return journal

    @property
    def _journal(self) -> Journal:
        assert self._opened is not None
        return self._opened

    # The page.

    def _write_page(self, *, now: bool = False) -> None:
        """Write it, if this is the chief and it is time again."""
        began = time.monotonic()
        if not self.task.is_chief or not (now or began >= self._next_page):
            return
        try:
            write_whole(self._page, page_of(read_run(self._page)))
        except OSError as error:
            _logger.warning(
                "Report: %s cannot be written (%s). Training goes on.",
                self._page,
                error,
            )
        took = time.monotonic() - began
        self._next_page = began + max(_PAGE_EVERY_S, _PAGE_SHARE * took)

    def _await_others(self) -> None:
        """Give workers that write here a moment to write that they are done."""
        deadline = time.monotonic() + (_OTHERS_S if len(self.task.names) > 1 else 0.0)
        while time.monotonic() < deadline:
            others = read_run(self._page).workers[1:]
            if all(worker.fits[-1].state != "running" for worker in others):
                return
            time.sleep(0.05)

    # What is measured.

    def _measured(self) -> diagnosis.Measurements:
        """What training was like; every worker in step has to call it at once."""
        total = together(self._epochs)
        strategy = self.task.strategy
        executions = int(total.counts["executions"] - total.counts["first_executions"])
        group = None if strategy is None else strategy.group
        # Even where too little was timed: the others do it, too.
        start_s = start_seconds(len(self._model.variables), group)
        sum_s = (
            0.0
            if group is None
            else sum_seconds(strategy, self._model.trainable_variables)
        )
        steps, wall = total.timed_steps, total.timed_s
        is_timed = steps > 0 and wall > 0
        outside = total.counts["waits_s"], total.exchange_s
        # Asynchronous workers ask for a step while the last one's values travel.
        is_both = getattr(strategy, "overlaps", False)
        around_s = max(outside) if is_both else sum(outside)
        communication = None
        if sum_s is not None:
            communication = _share(sum_s * steps + around_s, wall)
        rate, slow_share, slow_name = self._of_all(total)
        batch = total.counts["examples"] / max(1.0, total.counts["steps"])
        return diagnosis.Measurements(
            executions=executions,
            step_s=wall / steps if is_timed else math.nan,
            examples_per_s=rate,
            batch=batch,
            num_replicas=1 if strategy is None else strategy.num_replicas_in_sync,
            kind=self._kind(),
            input=slow_share,
            communication=communication,
            start=_share(start_s * executions, wall),
            steps_per_execution=self._model.steps_per_execution,
            is_compressed=self._is_compressed(),
            input_worker=slow_name,
        )

    def _of_all(self, total: Epoch) -> tuple[float, float, str]:
        """Examples per second of all workers, and who waited for input most."""
        mine = total.input_share if math.isfinite(total.input_share) else 0.0
        if not self.task.is_chief or len(self.task.names) == 1:
            return total.examples_per_s, mine, ""
        self._await_epochs()
        found = {self.task.name: total}
        for worker in read_run(self._page).workers[1:]:
            if worker.fits[-1].epochs:
                found[worker.name] = together(worker.fits[-1].epochs)
        shares = {n: e.input_share for n, e in found.items()}
        known = {n: share for n, share in shares.items() if math.isfinite(share)}
        slowest = max(known, key=lambda name: known[name], default=self.task.name)
        rate = total.examples_per_s
        if self.task.served is not None:
            rates = [e.examples_per_s for e in found.values()]
            rate = sum(r for r in rates if math.isfinite(r))
        return rate, known.get(slowest, 0.0), slowest

    def _await_epochs(self) -> None:
        """Give workers that write here a moment to write their last epoch."""
        deadline = time.monotonic() + _OTHERS_S
        while time.monotonic() < deadline:
            others = read_run(self._page).workers[1:]
            if all(self._has_last(worker.fits[-1].epochs) for worker in others):
                return
            time.sleep(0.05)

    def _has_last(self, epochs: list[Epoch]) -> bool:
        return bool(epochs) and epochs[-1].number >= self._epochs[-1].number

    def _kind(self) -> diagnosis.Kind:
        strategy = self.task.strategy
        if self.task.served is not None:
            return "servers"
        if strategy is None or strategy.num_replicas_in_sync == 1:
            return "alone"
        return "central" if strategy.group.defers_updates else "replicas"

    def _is_compressed(self) -> bool:
        strategy = self.task.strategy
        if strategy is None:
            return False
        is_served = self.task.served is not None
        options = strategy if is_served else strategy.group.communication
        return options.compression is not None


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Those logs that are one number; others have no place in a curve."""
    found = {}
    for name, value in logs.items():
        array = np.asarray(value)
        if array.size == 1 and array.dtype.kind in "fiub":
            found[str(name)] = float(array.reshape(()))
        elif array.size == 1 and array.dtype.name == "bfloat16":
            found[str(name)] = float(array.astype("float32").reshape(()))
    return found
