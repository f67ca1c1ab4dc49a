"""The order check: finds workers that make different calls, by their dispatch logs."""

import json
import time
from collections.abc import Sequence

from replicax.cluster.dispatch_log import Difference, DispatchLog, PeerLog
from replicax.cluster.store import Store

__all__ = ["OrderCheck"]

_LOGS = "replicax/order"
_WAIT_SECONDS = 3.0
"""For the logs of workers that may be lost."""


class OrderCheck:
    """Compares this worker's log with the others', and finds where they part.

    Checksums travel with the heartbeats. Only where they differ are the operations
    themselves exchanged.

    Args:
        log: This worker's.
        names: The workers' tasks, in order.
        index: This worker.
        store: What they share.

    Attributes:
        difference: Where the logs part, once that is known.
        found_at: When it was found, by the monotonic clock.
        differs_after: Up to which operation they are equal, if they are known to
            differ somewhere.
    """

    def __init__(
        self, log: DispatchLog, names: Sequence[str], index: int, store: Store
    ) -> None:
        self.difference: Difference | None = None
        self.found_at = 0.0
        self.differs_after: int | None = None
        self._log = log
        self._names = names
        self._index = index
        self._store = store
        self._peers = {i: PeerLog(log) for i in range(len(names)) if i != index}
        self._told_at: float | None = None

    @property
    def is_settling(self) -> bool:
        """Whether the logs are known to differ, but not where."""
        return self.differs_after is not None and self.difference is None

    def hear(self, index: int, log: tuple[int, int], differs_after: int | None) -> None:
        """Take in what another worker tells of its log.

        Args:
            index: Which worker.
            log: Number of its operations, and the checksum of them.
            differs_after: What that worker has found.
        """
        peer = self._peers[index]
        peer.hear(*log)
        if self.differs_after is not None:
            return
        if peer.differs:
            self.differs_after = min(p.agreed for p in self._peers.values())
        elif differs_after is not None:
            self.differs_after = differs_after

    def settle(self, *, has_left: bool) -> None:
        """If the logs differ, tell the others this one, and look for the difference.

        Args:
            has_left: Whether this worker's script has come to its end.

        Raises:
            StoreError: If the store does not answer.
        """
        if self.differs_after is None or self.difference is not None:
            return
        if self._told_at is None:
            told = self._log.since(self.differs_after, ended=has_left)
            self._store.put(f"{_LOGS}/{self._index}", json.dumps(told))
            self._told_at = time.monotonic()
        texts = self._store.read(_LOGS)
        count = len(self._names)
        waits = time.monotonic() - self._told_at < _WAIT_SECONDS
        if len(texts) < count and waits:
            return
        logs = [
            json.loads(texts[str(i)]) if str(i) in texts else None for i in range(count)
        ]
        self.found_at = time.monotonic()
        self.difference = Difference.between(logs) or Difference.at_the_ends(logs)
