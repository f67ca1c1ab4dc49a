"""Which worker a reported `fit` runs in."""

import logging
from collections import Counter
from typing import Any

from replicax.errors import ClusterError

__all__ = ["Task"]

_logger = logging.getLogger("replicax")

_MEET_S = 10.0


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

    @property
    def straggler(self) -> str:
        """Who waits for which worker, as the first worker has found; empty: nobody."""
        if not self.is_in_step or self.strategy.workers.watch is None:
            return ""
        return self.strategy.workers.watch.stragglers.found

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
                "the training report", value, timeout_seconds=_MEET_S, in_order=False
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
