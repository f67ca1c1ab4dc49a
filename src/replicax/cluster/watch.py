"""Threads that exchange heartbeats, and end this process when a peer has failed.

A process inside a collective that waits for a lost peer cannot be interrupted. So these
threads end the process, with a message, a `FailureReport` and an exit code that is
retryable if a restart may help.
"""

import dataclasses
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from replicax.cluster.dispatch_log import DispatchLog, Operation, OrderCheck
from replicax.cluster.failure import FailureReport, end_process
from replicax.cluster.failure_detector import Heartbeat, Sign, judge
from replicax.cluster.stopping import StopRequest
from replicax.cluster.store import Store, StoreError
from replicax.cluster.timeouts import Timeouts

__all__ = ["Watch"]

_STATUS = "replicax/status"
_FIELDS = [field.name for field in dataclasses.fields(Heartbeat)]
_POLL_SECONDS = 0.05


class Watch:
    """Sends this worker's heartbeats, and watches the others'.

    `signs` has the last heartbeat of each worker, in order, and `me` is this worker's.
    `order` compares the workers' logs of collective operations; `log` is this worker's.
    `is_missed` becomes true if others still need this worker after its script ended.
    """

    def __init__(
        self,
        names: Sequence[str],
        addresses: Sequence[str],
        index: int,
        store: Store,
        timeouts: Timeouts,
        stop: StopRequest,
    ) -> None:
        now = time.monotonic()
        self.signs = [
            Sign(name=name, address=address, seen_at=now, moved_at=now)
            for name, address in zip(names, addresses, strict=True)
        ]
        self.me = self.signs[index]
        self.store = store
        self.is_missed = False
        self.log = DispatchLog()
        self.order = OrderCheck(self.log, len(names), index, store)
        self._index = index
        self._timeouts = timeouts
        self._stop = stop
        self._interval = min(1.0, timeouts.heartbeat / 5)
        self._contact_at = now  # The last answer of the store.
        # The last program's number, and a function: whether the program has finished.
        self._latest: tuple[int, Callable[[], bool]] = (0, lambda: True)
        self._resumed_at = 0
        self._written_steps = 0
        self._ending = threading.Lock()
        self._publishing = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"replicax-{name}", daemon=True)
            for name, run in (("watch", self._exchange), ("clock", self._judge))
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def dispatching(self, operation: Operation) -> None:
        """Note that a program is being dispatched to the devices."""
        self.log.note_program(operation)
        self._latest = (self._latest[0] + 1, lambda: False)

    def dispatched(self, result: Any) -> None:
        """Note that the program is dispatched; `result` is one of its arrays.

        None: the program has finished, or was not started.
        """
        self._latest = (self._latest[0], getattr(result, "is_ready", lambda: True))

    def resume_at(self, steps: int) -> None:
        """Set the number of steps of earlier attempts; `steps` includes them."""
        self._resumed_at = steps

    @property
    def has_stepped(self) -> bool:
        """Whether a program was ever dispatched to the devices."""
        return self._latest[0] > 0

    def leave(self) -> None:
        """Publish that this worker's script has ended."""
        self._note_progress()  # Before `has_left`, which makes the steps final.
        self.me.has_left = True
        self._publish()

    @property
    def has_equal_logs(self) -> bool:
        """Whether all workers' logs have the same length, and no known difference."""
        counts = {sign.log[0] for sign in self.signs}
        return len(counts) == 1 and self.order.differs_after is None

    @property
    def steps(self) -> dict[str, int]:
        """The last known step of each worker."""
        self._note_progress()
        return {sign.name: sign.steps for sign in self.signs}

    def fail(self, report: FailureReport) -> NoReturn:
        """Publish a report, which ends all workers, and end this process."""
        with self._ending:  # Never released: the process ends here.
            self.me.failure = dataclasses.asdict(report)
            publisher = threading.Thread(target=self._publish, daemon=True)
            publisher.start()
            publisher.join(timeout=3)
            end_process(report)

    # The thread that reads and writes the store.

    def _exchange(self) -> None:
        while self._wait_for_next():
            try:
                self._publish()
                self._receive(self.store.read(_STATUS))
                self.order.exchange_logs(has_left=self.me.has_left)
            except StoreError:
                continue  # The other thread checks the time since the last answer.
            self._contact_at = time.monotonic()

    def _wait_for_next(self) -> bool:
        """Wait until the next exchange; return False after `close`."""
        begin = time.monotonic()
        while not self._closed.wait(min(_POLL_SECONDS, self._interval)):
            # While the workers agree on the step to stop after, their scripts wait.
            is_urgent = self._stop.is_settling or self.order.is_settling
            if is_urgent or time.monotonic() - begin >= self._interval:
                return True
        return False

    def _publish(self) -> None:
        with self._publishing:
            me = self.me
            self._note_progress()
            if me.frozen is None and self._stop.requested:
                me.frozen = self._stop.freeze()
            if me.steps != self._written_steps:
                self._written_steps = me.steps
                FailureReport.note_progress(me.name, me.steps)
            me.beat += 1
            me.differs_after = self.order.differs_after
            beat = {name: getattr(me, name) for name in _FIELDS}
            self.store.put(f"{_STATUS}/{self._index}", json.dumps(beat))

    def _note_progress(self) -> None:
        """Update this worker's progress, without waiting for the devices."""
        me, (number, is_ready) = self.me, self._latest
        count, checksum, steps = self.log.latest()
        me.steps = self._resumed_at + steps
        me.doing = self.log.last_name
        if (count, checksum) != me.log:
            me.log, me.moved_at = (count, checksum), time.monotonic()
        me.dispatched = number
        try:
            if is_ready():
                me.completed = number
        except RuntimeError:  # A later program has donated the array.
            me.completed = number
        me.seen_at = time.monotonic()

    def _receive(self, beats: dict[str, str]) -> None:
        now = time.monotonic()
        frozen: list[int] = []
        # A worker without a heartbeat yet may be ahead of all others.
        num_unfrozen = len(self.signs) - len(beats)
        for key, text in beats.items():
            beat, sign = json.loads(text), self.signs[int(key)]
            if beat["frozen"] is not None:
                # Workers that have left count, too: all must stop at the same step.
                frozen.append(beat["frozen"])
                self._stop.requested = True
            elif not beat["has_left"]:
                num_unfrozen += 1
            if sign is self.me:
                continue
            beat["log"] = tuple(beat["log"])
            if beat["beat"] != sign.beat:
                sign.seen_at = now
            if beat["log"] != sign.log:
                sign.moved_at = now
            vars(sign).update(beat)
            self.order.compare(int(key), sign.log, sign.differs_after)
        if frozen and not num_unfrozen and self._stop.is_settling:
            self._stop.agree(max(frozen) + 1)

    # The thread that watches the deadlines; the other one may block in the store.

    def _judge(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(self._interval / 2):
            now = time.monotonic()
            if now - looked_at > self._timeouts.heartbeat / 2:
                # This process was paused, and could not receive heartbeats.
                self._contact_at = now
                for sign in self.signs:
                    sign.seen_at = sign.moved_at = now
            looked_at = now
            report = self._lost_coordinator(now) or judge(
                self.signs,
                self._index,
                now,
                self._timeouts,
                last_read_at=self._contact_at,
                difference=self.order.difference,
                difference_at=self.order.difference_at,
                logs_differ=self.order.differs_after is not None,
            )
            if report is None:
                continue
            if self._closed.is_set():
                return
            is_mine = report.culprit == self.me.name
            if is_mine and report.kind == "exited":
                # This worker's script has ended: it keeps its own exit status.
                self.is_missed = True
                return
            if is_mine and report.kind != "order" and report.traceback is None:
                report = dataclasses.replace(report, traceback=_stack_of_main_thread())
            self.fail(report)

    def _lost_coordinator(self, now: float) -> FailureReport | None:
        silent = now - self._contact_at
        if silent <= self._timeouts.heartbeat:
            return None
        first = self.signs[0]
        return FailureReport(
            task=self.me.name,
            culprit=first.name,
            kind="lost",
            message=f"the coordination service beside {first.full_name} has not "
            f"answered for {silent:.0f} s. Its machine or the network to it is down.",
            steps=self.steps,
        )


def _stack_of_main_thread() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""
