"""The exception hook: an exception that nobody catches ends all workers."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType

import jax

from replicax.cluster.exceptions import report_of
from replicax.cluster.failure import ExitCode, FailureReport
from replicax.cluster.store import StoreError
from replicax.cluster.watch import Watch, end_process
from replicax.cluster.workers import Workers
from replicax.errors import ClusterError

__all__ = ["report_exceptions", "retry_if_not_caught"]

_COLLECTIVE_FAILED = ("unknown: gloo", "internal: gloo", "unavailable: gloo")


def retry_if_not_caught(name: str) -> None:
    """Make a start-up that failed end this process with the code that says so."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, error, trace)
        if isinstance(error, ClusterError):
            end_process(
                FailureReport(
                    task=name,
                    culprit=None,
                    kind="start-up",
                    message=str(error),
                    exit_code=int(ExitCode.RETRY),
                )
            )

    sys.excepthook = hook


def report_exceptions(members: Workers, watch: Watch) -> None:
    """Make an exception that ends this script end the other workers', too."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):  # Of which the report says it all.
            watch.fail(report_of(members.name, error, trace, steps=watch.steps))
        about_a_peer = _is_about_a_peer(error)
        if about_a_peer:  # JAX repeats its message for every array.
            text = f"{kind.__name__}: {error}"[:500]
            print(f"replicax: {members.name}: {text}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)
        if about_a_peer:
            # Another worker's end, probably: the watch will know more and end this
            # process before this wait is over.
            time.sleep(members.timeouts.heartbeat + 3)
            previous(kind, error, trace)
        watch.fail(_failure(members.name, watch.steps, error, trace, about_a_peer))

    sys.excepthook = hook


def _is_about_a_peer(error: BaseException) -> bool:
    """Whether an exception may come of a worker that is gone."""
    if isinstance(error, ClusterError):
        return isinstance(error.__cause__, StoreError)
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "socket", "coordinat")
    if isinstance(error, jax.errors.JaxRuntimeError):
        # A callback's error has the text of its traceback.
        return "callback" not in text and any(word in text for word in words)
    # What JAX makes of a collective that fails while it is dispatched.
    return isinstance(error, ValueError) and text.startswith(_COLLECTIVE_FAILED)


def _failure(
    name: str,
    steps: Mapping[str, int],
    error: BaseException,
    trace: TracebackType | None,
    about_a_peer: bool,
) -> FailureReport:
    if isinstance(error, ClusterError) and error.culprit is not None:
        # That worker adds where it is. This one's place has been printed.
        return FailureReport(
            task=name,
            culprit=error.culprit,
            kind="stuck",
            message=str(error),
            exit_code=int(ExitCode.RETRY),
            steps=steps,
        )
    return report_of(name, error, trace, steps=steps, about_a_peer=about_a_peer)
