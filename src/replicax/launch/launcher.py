"""Run all tasks of a cluster on this machine, again after failures that may pass."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator

from replicax.cluster.failure import ATTEMPT, ExitCode
from replicax.launch.attempt import ClusterCommand, run_attempt
from replicax.launch.console import TaskConsole
from replicax.launch.outcome import (
    Failure,
    Outcome,
    RestartPolicy,
    crash_loop,
    exit_status,
    last_lines,
)
from replicax.launch.served import run_served

__all__ = ["ATTEMPT", "launch"]

_PERMANENT = "permanent: another attempt would fail again"
_CRASH_LOOP = "retryable, but three attempts in a row got no further: a crash loop"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK_S = 0.1


def launch(
    command: ClusterCommand,
    *,
    max_restarts: int = 3,
    backoff_seconds: float = 1.0,
    restart_on_any: bool = False,
) -> int:
    """Run a cluster's tasks until they are done, or have failed for good.

    All are started again when one fails with a retryable exit code, see `ExitCode`;
    with parameter servers only that one is, and the others go on. SIGINT, SIGTERM and
    SIGHUP go on to the tasks, and nothing is started again; a second SIGINT kills the
    tasks. Must be called in the main thread.

    Args:
        command: What to run.
        max_restarts: How often to start again, each task with parameter servers.
        backoff_seconds: The wait before the first restart; it doubles from then on, up
            to a minute.
        restart_on_any: Whether to start again after any failure, also one that the
            exit code says is permanent.

    Returns:
        The exit status of the task that failed first, 128 and the signal's number if a
        signal ended it; 0 if none did. After SIGINT 130, however the tasks ended.
    """
    policy = RestartPolicy(
        max_restarts=max_restarts,
        backoff_seconds=backoff_seconds,
        on_any=restart_on_any,
    )
    console = TaskConsole(command.names)
    run = run_served if "ps" in command.num_tasks else _run_together
    with received_signals() as signals:
        status = run(command, console, signals, policy)
        # Who started this must not start it again because of what a task made of it.
        return ExitCode.INTERRUPTED if signal.SIGINT in signals else status


def _run_together(
    command: ClusterCommand,
    console: TaskConsole,
    signals: list[int],
    policy: RestartPolicy,
) -> int:
    """Run tasks that start and end together; the exit status."""
    outcomes: list[Outcome] = []
    while True:
        attempt = dataclasses.replace(
            command,
            environment={**command.environment, ATTEMPT: str(len(outcomes))},
        )
        outcomes.append(run_attempt(attempt, console, signals))
        reason = _reason_to_stop(outcomes, policy)
        if reason is None:
            wait = policy.wait_seconds(len(outcomes) - 1)
            _announce(console, outcomes, policy.max_restarts, wait)
            if _sleep(wait, signals):
                continue
            reason = "a signal came before the restart"
        return _finish(console, outcomes, reason)


@contextlib.contextmanager
def received_signals() -> Iterator[list[int]]:
    """Take the signals that ask a process to end into a list, while in the context.

    A signal that this process ignores, as SIGHUP under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "launch: signals reach the main thread only, and this is "
            f"{threading.current_thread().name}. Call it in the main thread."
        )
    received: list[int] = []
    before = {}
    try:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, _: received.append(n))
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason_to_stop(outcomes: list[Outcome], policy: RestartPolicy) -> str | None:
    """Why the last attempt is the last one; None: it is not."""
    failure = outcomes[-1].failure
    if failure is None:
        return "done"
    if outcomes[-1].signal is not None:
        return f"after {signal.Signals(outcomes[-1].signal).name}"
    if exit_status(failure.exit_code) == ExitCode.INTERRUPTED:
        return "interrupted"
    if policy.is_permanent(failure):
        return _PERMANENT
    if crash_loop(outcomes):
        return _CRASH_LOOP
    if len(outcomes) > policy.max_restarts:
        return "retryable, but no restart is left"
    return None


def _announce(
    console: TaskConsole, outcomes: list[Outcome], max_restarts: int, wait: float
) -> None:
    failure = outcomes[-1].failure
    assert failure is not None
    console.say(
        f"{failure.message} Restart {len(outcomes)} of {max_restarts} in {wait:.1f} s."
    )


def _sleep(seconds: float, signals: list[int]) -> bool:
    """Whether the time passed without a signal."""
    end = time.monotonic() + seconds
    while not signals and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _TICK_S))
    return not signals


def _finish(console: TaskConsole, outcomes: list[Outcome], reason: str) -> int:
    num = len(outcomes) - 1
    restarts = f"{num} restart" if num == 1 else f"{num} restarts"
    failure = outcomes[-1].failure
    if failure is None:
        if num:
            console.say(f"All tasks are done, after {restarts}.")
        return ExitCode.DONE
    first = outcomes[0].failure
    if reason == _CRASH_LOOP and first is not None:
        console.say(f"The first failure of the first attempt:\n{_describe(first)}")
    elif lines := last_lines(failure):
        console.say(lines)
    console.say(
        f"{failure.task} failed first, with exit code "
        f"{exit_status(failure.exit_code)} ({reason}), after {restarts}. "
        f"{failure.message}"
    )
    return exit_status(failure.exit_code)


def _describe(failure: Failure) -> str:
    return f"{failure.message}\n{failure.traceback or ''}".rstrip()
