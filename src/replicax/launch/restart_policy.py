"""The restart policy: which failures a restart follows, how often and how soon."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

from replicax.cluster.failure import ExitCode, is_retryable
from replicax.launch.failures import Failure, exit_status

__all__ = ["CRASH_LOOP", "GiveUp", "RestartPolicy", "back_off", "crash_loop"]

_MAX_BACK_OFF_S = 60.0
_FRUITLESS = 3


class GiveUp(NamedTuple):
    """Why a failure is not followed by a restart.

    Attributes:
        said: In words for the moment of the failure, when other tasks may go on.
        told: In words for the summary of the job.
    """

    said: str
    told: str


_INTERRUPTED = GiveUp("It would fail again", "interrupted")
_PERMANENT = GiveUp(
    "It would fail again", "permanent: another attempt would fail again"
)
CRASH_LOOP = GiveUp(
    "Three restarts in a row brought no step more",
    "retryable, but three attempts in a row got no further: a crash loop",
)
_NONE_LEFT = GiveUp("No restart is left", "retryable, but no restart is left")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Which failures are followed by a restart, and how often.

    Attributes:
        max_restarts: How often at most.
        backoff_seconds: The wait before the first restart; it doubles from then on, up
            to a minute.
        on_any: Whether after any failure, and not only one that may pass. An interrupt
            (SIGINT) is never followed by a restart.
    """

    max_restarts: int = 3
    backoff_seconds: float = 1.0
    on_any: bool = False

    def is_permanent(self, failure: Failure) -> bool:
        """Whether nothing is restarted after this failure, whatever is left."""
        if self.on_any:
            return exit_status(failure.exit_code) == ExitCode.INTERRUPTED
        return not is_retryable(failure.exit_code)

    def give_up(self, failure: Failure, steps: Sequence[int]) -> GiveUp | None:
        """Why a failure is not followed by a restart; None: it is.

        Args:
            failure: The failure.
            steps: How far each attempt came that has failed, this one the last.
        """
        if self.is_permanent(failure):
            interrupted = exit_status(failure.exit_code) == ExitCode.INTERRUPTED
            return _INTERRUPTED if interrupted else _PERMANENT
        if crash_loop(steps):
            return CRASH_LOOP
        return _NONE_LEFT if len(steps) > self.max_restarts else None


def crash_loop(steps: Sequence[int]) -> bool:
    """Whether three attempts in a row got no further than the one before each.

    Args:
        steps: How far each attempt came.

    Example:
        >>> crash_loop([7, 9, 9, 8, 8]), crash_loop([7, 9, 9, 8])
        (True, False)
    """
    last = steps[-_FRUITLESS - 1 :]
    return len(last) > _FRUITLESS and all(
        after <= before for before, after in itertools.pairwise(last)
    )


def back_off(restart: int, base_seconds: float) -> float:
    """How long to wait before a restart, in seconds.

    Doubles from restart to restart up to a minute. A random part keeps jobs that failed
    together from coming back together.

    Args:
        restart: 0 for the first one.
        base_seconds: The wait before that, but for the random part.

    Example:
        >>> 0.75 <= back_off(0, 1.0) <= 1.25, back_off(50, 1.0) <= 60
        (True, True)
    """
    # The bound of the exponent: a float has an end.
    wait = base_seconds * 2.0 ** min(restart, 60) * random.uniform(0.75, 1.25)
    return min(wait, _MAX_BACK_OFF_S)
