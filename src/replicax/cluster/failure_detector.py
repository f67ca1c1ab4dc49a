"""Finds a failed worker from all workers' heartbeats, without clock or I/O."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicax._util.listing import listed
from replicax.cluster.dispatch_log import Difference
from replicax.cluster.failure import ExitCode, FailureReport
from replicax.cluster.timeouts import Timeouts

__all__ = ["Heartbeat", "Sign", "judge"]

_GRACE_SECONDS = 3.0
"""Time for a waiting script to raise its own, more precise error."""
_LEFT_SECONDS = 1.0
"""Time until the last heartbeat of a worker that has left must have arrived."""


@dataclasses.dataclass(kw_only=True)
class Heartbeat:
    """A worker's heartbeat, about once a second."""

    beat: int = 0  # Number of heartbeats so far.
    dispatched: int = 0  # Number of programs dispatched to its devices.
    completed: int = 0  # Number of programs that are known to have finished.
    steps: int = 0  # Training and other steps in the dispatched programs.
    log: tuple[int, int] = (0, 0)  # Length and checksum of its `DispatchLog`.
    doing: str = ""  # Name of the last operation in the log.
    differs_after: int | None = None  # As in `OrderCheck`.
    # Whether its script waits in an exchange with all workers. The exchange raises an
    # error of its own if a worker is missing.
    is_waiting: bool = False
    has_left: bool = False  # Whether its script has ended.
    failure: dict[str, Any] | None = None  # The report of the failure that ends it.
    frozen: int | None = None  # The step count at which `StopRequest` froze it.


@dataclasses.dataclass(kw_only=True)
class Sign(Heartbeat):
    """A worker's last heartbeat; times are by the clock of the judging worker."""

    name: str  # The worker's task, such as "worker:1".
    address: str = ""  # Empty: unknown.
    seen_at: float = 0.0  # Arrival of the last heartbeat.
    moved_at: float = 0.0  # Last change of `log`.

    @property
    def full_name(self) -> str:
        """The name, with the address if it is known."""
        return f"{self.name} ({self.address})" if self.address else self.name


def judge(
    signs: Sequence[Sign],
    index: int,
    now: float,
    timeouts: Timeouts,
    *,
    last_read_at: float | None = None,
    difference: Difference | None = None,
    difference_at: float = 0.0,
    logs_differ: bool = False,
) -> FailureReport | None:
    """Decide whether worker `index` has to end now; return its report, or None.

    `signs` are all workers', in order. Silence is measured up to `last_read_at`, the
    time of the last successful read of heartbeats, by default `now`. With
    `logs_differ` no ended script is the cause, even if `difference` is still unknown.
    """
    me = signs[index]
    return (
        _failed(me, signs)
        or _lost(me, signs, now if last_read_at is None else last_read_at, timeouts)
        or _differ(me, signs, now - difference_at, difference)
        or (None if logs_differ else _left(me, signs, now))
        or _stuck(me, signs, now, timeouts)
    )


def _failed(me: Sign, signs: Sequence[Sign]) -> FailureReport | None:
    """Adopt the report of a peer that has failed."""
    failures = [x.failure for x in signs if x is not me and x.failure is not None]
    if not failures:
        return None
    first = FailureReport(**min(failures, key=lambda failure: failure["time"]))
    # The failed worker's counts of the others' steps may be older.
    steps = {s.name: max(s.steps, first.steps.get(s.name, 0)) for s in signs}
    return dataclasses.replace(first, task=me.name, steps=steps)


def _lost(
    me: Sign, signs: Sequence[Sign], last_read_at: float, timeouts: Timeouts
) -> FailureReport | None:
    for sign in signs:
        silent = last_read_at - sign.seen_at
        is_expected = sign is not me and not sign.has_left
        if is_expected and silent > timeouts.heartbeat:
            return _report(
                me,
                sign,
                "lost",
                f"{sign.full_name} has given no sign of life for {silent:.0f} s. Its "
                "process has died or is stopped, or its machine or network is down.",
                signs,
            )
    return None


def _differ(
    me: Sign, signs: Sequence[Sign], known_for: float, difference: Difference | None
) -> FailureReport | None:
    if difference is None:
        return None
    if known_for < _GRACE_SECONDS and any(sign.is_waiting for sign in signs):
        return None  # The script that waits raises this difference itself.
    groups: dict[str, list[str]] = {}
    for sign, operation in zip(signs, difference.operations, strict=True):
        what = "no further operation" if operation is None else operation.name
        groups.setdefault(what, []).append(sign.name)
    places = ", and ".join(
        f"{listed(who)} {'is' if len(who) == 1 else 'are'} at {what}"
        for what, who in groups.items()
    )
    return _report(
        me,
        signs[difference.culprit],
        "order",
        f"the workers run different programs: at step {difference.step + 1}, {places}. "
        "All workers must run the same steps in the same order. Look for a step, an "
        "evaluation or a `break` that depends on the worker.",
        signs,
    )


def _left(me: Sign, signs: Sequence[Sign], now: float) -> FailureReport | None:
    grace = _GRACE_SECONDS if me.is_waiting else _LEFT_SECONDS
    if now - me.moved_at < grace:  # A script that waits raises its own error.
        return None
    for sign in signs:
        if not sign.has_left or sign.log[0] == me.log[0]:
            continue  # This skips the worker itself, too.
        first, last = sorted([sign, me], key=lambda x: x.log[0])
        if first.has_left:
            return _report(
                me,
                first,
                "exited",
                f"{first.full_name} ended its script after step {first.steps}, while "
                f"{last.name} is at step {last.steps}. {first.name} ended after "
                f"{first.doing or 'nothing'}, {last.name} is at {last.doing}. All "
                "workers must run the same steps.",
                signs,
            )
    return None


def _stuck(
    me: Sign, signs: Sequence[Sign], now: float, timeouts: Timeouts
) -> FailureReport | None:
    running = [sign for sign in signs if not sign.has_left]
    unmoved = now - max((sign.moved_at for sign in running), default=now)
    if unmoved <= timeouts.step or me.has_left:
        return None
    least = min(sign.dispatched for sign in running)
    behind = [sign for sign in running if sign.dispatched == least]
    if len(behind) < len(running):
        names = listed(sign.full_name for sign in behind)
        return _report(
            me,
            behind[0],
            "stuck",
            f"{names} did not go on after step {behind[0].steps}, but is alive. The "
            f"others have waited {unmoved:.0f} s. Its script waits for something: "
            "data, a lock, a service.",
            signs,
        )
    if me.completed < me.dispatched:
        return _report(
            me,
            None,
            "stuck",
            f"step {me.steps} runs on all workers and has not finished in "
            f"{unmoved:.0f} s. The devices or the network between them hang; a step "
            "that takes longer needs a larger rx.Timeouts(step=...).",
            signs,
        )
    return None


def _report(
    me: Sign, culprit: Sign | None, kind: str, message: str, signs: Sequence[Sign]
) -> FailureReport:
    is_permanent = kind in ("exited", "order")
    exit_code = ExitCode.FAILED if is_permanent else ExitCode.RETRY
    return FailureReport(
        task=me.name,
        culprit=None if culprit is None else culprit.name,
        kind=kind,
        message=message,
        exit_code=int(exit_code),
        steps={sign.name: sign.steps for sign in signs},
    )
