"""Exception hooks: an uncaught exception in one worker ends all workers."""

import sys
import time
from types import TracebackType

import jax

from replicax.cluster.failure import FailureReport, end_process, report_of
from replicax.cluster.store import StoreError
from replicax.cluster.watch import Watch
from replicax.cluster.workers import Workers
from replicax.errors import ClusterError

__all__ = ["report_exceptions", "retry_if_not_caught"]

_COLLECTIVE_FAILED = ("unknown: gloo", "internal: gloo", "unavailable: gloo")
_TRANSPORTS = ("gloo", "nccl", "connection", "socket", "coordinat")
_SHARED_GPU = "duplicate gpu detected"  # NCCL's message.


def retry_if_not_caught(name: str) -> None:
    """Make an uncaught `ClusterError` at start-up exit with a retryable status."""
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, error, trace)
        if isinstance(error, ClusterError):
            report = FailureReport(
                task=name, culprit=None, kind="start-up", message=str(error)
            )
            end_process(report)

    sys.excepthook = hook


def report_exceptions(members: Workers, watch: Watch) -> None:
    """Make an uncaught exception of this script end the other workers, too."""
    previous, name = sys.excepthook, members.name

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):  # The report names the script's line.
            watch.fail(report_of(name, error, trace, steps=watch.steps))
        about_a_peer = _is_about_a_peer(error)
        if about_a_peer:
            # JAX repeats its message for every array.
            text = f"{kind.__name__}: {error}"[:500]
            print(f"replicax: {name}: {text}", file=sys.stderr, flush=True)
            # If another worker has died, the failure detector names that worker, and
            # ends this process during this wait.
            time.sleep(members.timeouts.heartbeat + 3)
        previous(kind, error, trace)
        if isinstance(error, ClusterError) and error.culprit is not None:
            # The culprit prints its own stack; this worker's stack is above.
            report = FailureReport(
                task=name,
                culprit=error.culprit,
                kind="stuck",
                message=str(error),
                steps=watch.steps,
            )
            watch.fail(report)
        steps = watch.steps
        watch.fail(
            report_of(name, error, trace, steps=steps, about_a_peer=about_a_peer)
        )

    sys.excepthook = hook


def _is_about_a_peer(error: BaseException) -> bool:
    """Whether the loss of another worker may have caused an exception."""
    if isinstance(error, ClusterError):
        return isinstance(error.__cause__, StoreError)
    text = str(error).lower()
    if isinstance(error, jax.errors.JaxRuntimeError):
        # The error of a callback contains the text of its traceback.
        is_own = "callback" in text or _SHARED_GPU in text
        return not is_own and any(word in text for word in _TRANSPORTS)
    # JAX raises this if a collective fails while it is dispatched.
    return isinstance(error, ValueError) and text.startswith(_COLLECTIVE_FAILED)
