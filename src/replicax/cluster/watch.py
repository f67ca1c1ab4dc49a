"""Threads that send and receive heartbeats, and end the process when a peer has failed.

A process that waits in a collective for a peer that is gone cannot be interrupted, so
these threads end it: with a message, a `FailureReport`, and an exit code that says
whether to try again.
"""

import dataclasses
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from replicax._util.listing import listed
from replicax.cluster.dispatch_log import DispatchLog, Operation
from replicax.cluster.failure import ExitCode, FailureReport
from replicax.cluster.failure_detector import Sign, judge
from replicax.cluster.order_check import OrderCheck
from replicax.cluster.stopping import StopRequest
from replicax.cluster.store import Store, StoreError
from replicax.cluster.stragglers import Spending, Stragglers
from replicax.cluster.timeouts import Timeouts

__all__ = ["Watch", "end_process"]

_logger = logging.getLogger("replicax")
_STATUS = "replicax/status"
_NOT_YET = object()
"""The result of a program that is on its way to the devices."""
_SOON_SECONDS = 0.05
_MEANING: dict[int, str] = {
    ExitCode.RETRY: "retryable",
    ExitCode.INTERRUPTED: "interrupted",
}


class Watch:
    """Tells the others how far this worker is, and watches how far they are.

    Args:
        names: The workers' tasks, in order.
        addresses: Their addresses; empty where unknown.
        index: This worker.
        store: What they share.
        timeouts: How long to wait for what.
        stop: This worker's stop request.

    Attributes:
        num_exchanging: Exchanges that threads of this worker wait in.
        is_waiting: Whether this worker waits in an exchange that all make in order.
        is_missed: Whether the others have failed since this worker's script ended.
        log: What this worker does that all have to do in the same order.
        order: Whether they do.
        spending: How this worker's time goes.
        stragglers: Whom the others wait for; the first worker looks.
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
        self.is_missed = False
        self.num_exchanging = 0
        self.is_waiting = False
        self._signs = [
            Sign(name=name, address=address, seen_at=now, moved_at=now)
            for name, address in zip(names, addresses, strict=True)
        ]
        self._index = index
        self._me = self._signs[index]
        self._store = store
        self._timeouts = timeouts
        self._stop = stop
        self._interval = min(1.0, timeouts.heartbeat / 5)
        self._counter = 0
        self._beats: list[int] = [0] * len(names)
        self._contact_at = now
        self.log = DispatchLog()
        self.order = OrderCheck(self.log, names, index, store)
        self.spending = Spending()
        self.stragglers = Stragglers(names)
        self._latest: tuple[int, Any] = (0, None)
        self._awaited: tuple[int, Any] = (0, None)
        self._frozen: int | None = None
        self._agreed = False
        self._ending = threading.Lock()
        self._resumed_at = 0  # Steps of earlier attempts.
        self._noted_steps = 0
        self._closed = threading.Event()
        self._publishing = threading.Lock()
        self._thread = threading.Thread(
            target=self._exchange, name="replicax-watch", daemon=True
        )
        self._clock = threading.Thread(
            target=self._judge_often, name="replicax-watch-clock", daemon=True
        )

    def start(self) -> None:
        """Start the threads."""
        self._thread.start()
        self._clock.start()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._thread.join(timeout=5)
        self._clock.join(timeout=5)

    def dispatching(self, operation: Operation) -> None:
        """Note that a program goes to the devices."""
        self.log.note_program(operation)
        self._latest = (self._latest[0] + 1, _NOT_YET)

    def dispatched(self, result: Any) -> None:
        """Note that the devices have the program.

        Args:
            result: An array that it makes; None: it is done, or was not begun.
        """
        self._latest = (self._latest[0], result)

    def resume_at(self, steps: int) -> None:
        """Count on from the steps of earlier attempts; so it is seen that they got on.

        Args:
            steps: How many there were.
        """
        self._resumed_at = steps

    @property
    def has_stepped(self) -> bool:
        """Whether any step was handed to the devices."""
        return self._latest[0] > 0

    def leave(self) -> None:
        """Tell the others that this worker's script has come to its end."""
        self._note_progress()  # First: who has left makes no more steps.
        self._me.has_left = True
        self._publish()

    @property
    def signs(self) -> Sequence[Sign]:
        """What is known of the workers, in order."""
        return self._signs

    @property
    def all_did_the_same(self) -> bool:
        """Whether no worker is known to have done more than others, or other things."""
        counts = {sign.log[0] for sign in self._signs}
        return len(counts) == 1 and self.order.differs_after is None

    @property
    def steps(self) -> dict[str, int]:
        """The last step of each worker, as far as it is known."""
        self._note_progress()
        return {sign.name: sign.steps for sign in self._signs}

    def fail(self, report: FailureReport) -> NoReturn:
        """End this process, and by that all others, for the reason in `report`."""
        with self._ending:  # Never released: the process ends here.
            self._me.failure = dataclasses.asdict(report)
            publisher = threading.Thread(target=self._publish, daemon=True)
            publisher.start()
            publisher.join(timeout=3)
            end_process(report)

    def stack_of_main_thread(self) -> str:
        """Where this worker's script is, as a traceback."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else ""

    # The thread that talks to the store.

    def _exchange(self) -> None:
        while self._wait_for_next():
            try:
                self._publish()
                self._receive(self._store.read(_STATUS))
                self.order.settle(has_left=self._me.has_left)
            except StoreError:
                continue  # The clock's thread counts how long ago it worked.
            self._contact_at = time.monotonic()
            self._look_for_stragglers()

    def _look_for_stragglers(self) -> None:
        if self._index or not self.spending.is_on:
            return
        spent = [sign.spent for sign in self._signs]
        text = self.stragglers.look(time.monotonic(), spent, self._me.steps)
        if text is not None:
            _logger.warning("%s", text)

    def _sample(self) -> None:
        now = time.monotonic()
        if not self.spending.is_due(now):
            return
        self._note_progress()
        self.spending.sample(
            now,
            is_in_step=self._me.completed < self._me.dispatched,
            is_dispatching=self._latest[1] is _NOT_YET,
            is_exchanging=self.num_exchanging > 0,
        )
        self._me.spent = self.spending.spent

    def _wait_for_next(self) -> bool:
        """Wait until it is time for the next exchange; False: there is none."""
        begin = time.monotonic()
        while not self._closed.wait(min(_SOON_SECONDS, self._interval)):
            self._sample()
            # Workers that agree when to stop hold their scripts meanwhile.
            is_urgent = self._stop.requested and not self._agreed
            is_urgent = is_urgent or self.order.is_settling
            if is_urgent or time.monotonic() - begin >= self._interval:
                return True
        return False

    def _publish(self) -> None:
        with self._publishing:
            me = self._me
            self._note_progress()
            if self._frozen is None and self._stop.requested:
                self._frozen = self._stop.freeze()
            if me.steps != self._noted_steps:
                self._noted_steps = me.steps
                FailureReport.note_progress(me.name, me.steps)
            self._counter += 1
            status = {
                "beat": self._counter,
                "dispatched": me.dispatched,
                "steps": me.steps,
                "completed": me.completed,
                "log": me.log,
                "differs_after": self.order.differs_after,
                "doing": me.doing,
                "spent": self.spending.spent,
                "has_left": me.has_left,
                "is_waiting": self.is_waiting,
                "failure": me.failure,
                "frozen": self._frozen,
                "interrupted": self._stop.interrupted,
            }
            self._store.put(f"{_STATUS}/{self._index}", json.dumps(status))

    def _note_progress(self) -> None:
        """Find out how far the devices are, without a wait."""
        me, (number, result) = self._me, self._latest
        count, checksum, steps = self.log.latest()
        me.steps = self._resumed_at + steps
        me.doing = self.log.last_name
        me.is_waiting = self.is_waiting
        if (count, checksum) != me.log:
            me.log, me.moved_at = (count, checksum), time.monotonic()
        me.dispatched = number
        if self._awaited[1] is _NOT_YET:
            self._awaited = (number, result)
        if _is_ready(self._awaited[1]):
            me.completed = max(me.completed, self._awaited[0])
            self._awaited = (number, result)
        if _is_ready(self._awaited[1]):
            me.completed = max(me.completed, self._awaited[0])
        me.seen_at = time.monotonic()

    def _receive(self, statuses: dict[str, str]) -> None:
        now = time.monotonic()
        # Nothing was heard yet of who is missing: it may be ahead of all others.
        unfrozen, frozen = len(self._signs) - len(statuses), []
        for key, text in statuses.items():
            status = json.loads(text)
            sign = self._signs[int(key)]
            if status["frozen"] is not None:
                # Of one that has left as well: all must find the same step.
                frozen.append(status["frozen"])
                self._stop.interrupted |= status["interrupted"]
                self._stop.requested = True
            elif not status["has_left"]:
                unfrozen += 1
            if sign is self._me:
                continue
            if status["beat"] != self._beats[int(key)]:
                self._beats[int(key)] = status["beat"]
                sign.seen_at = now
            sign.dispatched = status["dispatched"]
            if tuple(status["log"]) != sign.log:
                sign.log, sign.moved_at = tuple(status["log"]), now
            sign.completed, sign.steps = status["completed"], status["steps"]
            sign.doing = status["doing"]
            sign.spent = tuple(status["spent"])
            self.order.hear(int(key), sign.log, status["differs_after"])
            sign.has_left = status["has_left"]
            sign.is_waiting = status["is_waiting"]
            sign.failure = status["failure"]
        if frozen and not unfrozen and not self._agreed:
            self._agreed = True
            self._stop.agree(max(frozen) + 1)

    # The thread that looks at the clock. The other one may wait for the store.

    def _judge_often(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(self._interval / 2):
            now = time.monotonic()
            if now - looked_at > self._timeouts.heartbeat / 2:
                # This process was paused: what it has not heard proves nothing.
                self._contact_at = now
                for sign in self._signs:
                    sign.seen_at = sign.moved_at = now
            looked_at = now
            report = self._coordinator_lost() or judge(
                self._signs,
                self._index,
                now,
                self._timeouts,
                heard_at=self._contact_at,
                difference=self.order.difference,
                found_at=self.order.found_at,
                is_settling=self.order.differs_after is not None,
            )
            if report is None:
                continue
            if self._closed.is_set():
                return
            if report.kind == "exited" and report.culprit == self._me.name:
                # Its script is over: it ends with its own exit status.
                self.is_missed = True
                return
            is_mine = report.culprit == self._me.name and report.kind != "order"
            if is_mine and report.traceback is None:
                stack = self.stack_of_main_thread()
                report = dataclasses.replace(report, traceback=stack)
            self.fail(report)

    def _coordinator_lost(self) -> FailureReport | None:
        silent = time.monotonic() - self._contact_at
        if silent <= self._timeouts.heartbeat:
            return None
        first = self._signs[0]
        return FailureReport(
            task=self._me.name,
            culprit=first.name,
            kind="lost",
            message=f"the coordination service beside {first.full_name} has not "
            f"answered for {silent:.0f} s. Its machine or the network to it is down.",
            exit_code=int(ExitCode.RETRY),
            steps=self.steps,
        )


def _is_ready(array: Any) -> bool:
    if array is None or array is _NOT_YET:
        return array is None
    try:
        return array.is_ready()
    except RuntimeError:  # Given to a later step, which tells more.
        return True


def end_process(report: FailureReport) -> NoReturn:
    """Print a report, leave it for the launcher, and end the process at once.

    Nothing else can be relied on: the main thread may be inside a collective that
    never returns, and exit handlers may wait for peers.
    """
    report.write()
    is_own = report.culprit == report.task and report.kind in ("exception", "mismatch")
    is_above = is_own or report.kind == "start-up"
    why = "because of the exception above" if is_above else report.message
    lines = [f"replicax: {report.task} ends: {why}"]
    if report.traceback and report.culprit != report.task:
        lines += [f"--- {report.culprit}:", report.traceback.rstrip(), "---"]
    elif report.traceback and report.kind == "stuck":
        lines += ["It is here:", report.traceback.rstrip()]
    if report.steps and report.kind != "interrupted":
        steps = listed(
            (f"{name} {step}" for name, step in report.steps.items()), last=", "
        )
        lines.append(f"Last steps: {steps}.")
    meaning = _MEANING.get(report.exit_code, "permanent")
    lines.append(f"Exit code {report.exit_code} ({meaning}).")
    print("\n".join(lines), file=sys.stderr, flush=True)
    sys.stdout.flush()
    faulthandler.disable()
    os._exit(report.exit_code)
