"""The workers of a cluster: all-gather and comparison of small host values."""

import collections
import functools
import json
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from replicax._util.hashes import digest
from replicax._util.listing import listed
from replicax._util.types import JSON
from replicax._util.waiting import wait_for
from replicax.cluster.dispatch_log import DispatchLog, Operation
from replicax.cluster.stopping import StopRequest
from replicax.cluster.store import Store, StoreError
from replicax.cluster.timeouts import Timeouts
from replicax.cluster.watch import Watch
from replicax.errors import ClusterError, ClusterMismatchError

__all__ = ["Workers", "current", "set_current"]

_SAME_CALLS = (
    "All workers must make the same calls of the strategy in the same order, such as "
    "training, evaluation and checkpoints, with batches of equal shapes, and none of "
    "them under a condition such as `if strategy.is_chief`."
)


class Workers:
    """The workers of a training cluster; without a cluster, one worker.

    Args:
        names: The names of the workers' tasks: `("chief:0", "worker:0")`.
        addresses: `"host:port"` of each worker; empty where unknown.
        index: This worker's index in that order.
        store: The workers' key-value store; None for a single worker.
        timeouts: The deadlines.

    Attributes:
        stop: The request to stop all workers after the same step.
        watch: Exchanges heartbeats with the others; None for a single worker.
    """

    def __init__(
        self,
        names: Sequence[str] = ("worker:0",),
        addresses: Sequence[str] = ("",),
        index: int = 0,
        *,
        store: Store | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.names = tuple(names)
        self.addresses = tuple(addresses)
        self.index = index
        self.timeouts = timeouts or Timeouts()
        self.stop = StopRequest(alone=store is None)
        self.watch: Watch | None = None
        self._exchanges: collections.Counter[str] = collections.Counter()
        self._num_streams = 0
        self._num_agreements = 0
        if store is not None:
            self.watch = Watch(
                self.names, self.addresses, index, store, self.timeouts, self.stop
            )

    @property
    def count(self) -> int:
        """Number of workers."""
        return len(self.names)

    @property
    def name(self) -> str:
        """This worker's task, such as `"worker:1"`."""
        return self.names[self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this is the first worker, which for example writes checkpoints."""
        return self.index == 0

    @property
    def log(self) -> DispatchLog | None:
        """The log of collective operations; None for a single worker."""
        return None if self.watch is None else self.watch.log

    def new_stream(self, name: str) -> str:
        """Return a unique name for the exchanges of a stream of batches.

        Workers may leave a stream after different numbers of exchanges, so streams must
        not share a name.
        """
        self._num_streams += 1
        return f"{name} {self._num_streams}"

    def exchange(
        self,
        name: str,
        value: object,
        deadline: str = "startup",
        while_waiting: Callable[[Sequence[int]], None] | None = None,
        *,
        what: str | None = None,
        in_order: bool = True,
    ) -> list[Any]:
        """All-gather a small value over the workers; this is also a barrier.

        Returns the values in the workers' order. An exchange takes a few milliseconds.
        Never exchange between the steps of a loop: while a worker waits here, it cannot
        compute the steps that others have already begun.

        Args:
            name: Key of the exchange. All workers exchange the same names in the same
                order.
            value: Anything that JSON can hold.
            deadline: The field of `Timeouts` that limits the wait.
            while_waiting: Called at each poll with the indices of the missing workers;
                may raise.
            what: Description of the exchange in messages; defaults to `name`.
            in_order: Whether all workers exchange after the same steps; False in a
                thread that reads ahead.

        Raises:
            ClusterError: At the deadline, naming the missing workers.
            ClusterMismatchError: Within seconds, if a missing worker's script has ended
                or does another operation instead.
        """
        watch = self.watch
        if watch is None:
            return [value]
        number = self._exchanges[name]
        self._exchanges[name] += 1
        keys = f"replicax/exchange/{urllib.parse.quote(name, safe='')}"
        if in_order:
            watch.me.is_waiting = True
            watch.log.note_in_script(_exchange_of(name, what))

        def check(missing: Sequence[int]) -> None:
            self._require_running(watch, name, missing)
            if while_waiting is not None:
                while_waiting(missing)
            if in_order:
                self._require_same_order(watch, what or name)

        try:
            folder = f"{keys}/{number}"
            watch.store.put(f"{folder}/{self.index}", json.dumps(value))
            values = self._values_in(folder, watch, name, deadline, check)
            if in_order:  # An error skips this: the script reports the error itself.
                watch.me.is_waiting = False
            if number:
                # All workers are in this exchange, so all have read the last exchange.
                watch.store.delete(f"{keys}/{number - 1}/{self.index}")
            return values
        except StoreError as error:
            raise ClusterError(
                f"{self.name}: the coordination service beside {self._listed([0])} "
                f"does not answer ({error}); {name} needed it."
            ) from error

    def _values_in(
        self,
        folder: str,
        watch: Watch,
        name: str,
        deadline: str,
        check: Callable[[Sequence[int]], None],
    ) -> list[Any]:
        timeout = getattr(self.timeouts, deadline)
        missing: list[int] = []

        def all_values() -> list[Any] | None:
            texts = watch.store.read(folder)
            if len(texts) == self.count:
                return [json.loads(texts[str(i)]) for i in range(self.count)]
            missing[:] = [i for i in range(self.count) if str(i) not in texts]
            check(missing)
            return None

        def late() -> NoReturn:
            raise ClusterError(
                f"{self.name}: {self._listed(missing)} did not come to {name} within "
                f"{timeout:.0f} s. See what that worker prints, or give it more time "
                f"(rx.Timeouts({deadline}=...)).",
                culprit=self.names[missing[0]],
            )

        return wait_for(
            all_values,
            timeout,
            late=late,
            reminder=lambda waited: (
                f"waiting for {self._listed(missing)} ({name}) for {waited:.0f} s"
            ),
            is_early=not watch.has_stepped,
        )

    def _require_running(self, watch: Watch, name: str, missing: Sequence[int]) -> None:
        """Raise if the script of a missing worker has ended."""
        gone = [i for i in missing if watch.signs[i].has_left]
        if gone:
            raise ClusterMismatchError(
                f"{self.name}: {self._listed(gone)} ended its script, but {name} needs "
                f"all workers. {_SAME_CALLS}"
            )

    def _require_same_order(self, watch: Watch, what: str) -> None:
        """Raise if the order check has found a difference between the workers.

        It raises in the script, so that the traceback shows the call.
        """
        difference = watch.order.difference
        if difference is None:
            return
        other = difference.other_than(self.index)
        me, sign = watch.me, watch.signs[other]
        operation = difference.operations[other]
        place = "no further operation" if operation is None else operation.name
        where = f"{sign.full_name} is at {place}"
        waits = f"{self.name} waits in {what}"
        if sign.steps > me.steps:
            waits += f" after step {me.steps}"
            where = (
                f"{sign.full_name} went on to step {sign.steps} without it, and is at "
                f"{place}"
            )
        raise ClusterMismatchError(f"{waits}, but {where}. {_SAME_CALLS}")

    def agree(self, facts: Mapping[str, JSON], what: str) -> int:
        """Compare facts that must be equal on all workers.

        The workers exchange hashes, and a fact itself only if its hashes differ. Lists
        are compared entry by entry. `what` is the subject of the facts, such as
        `"the program of run(step)"`. Returns the number of agreements so far.

        Raises:
            ClusterMismatchError: On all workers, with the first difference.
        """
        digests = {
            name: digest(json.dumps(fact, sort_keys=True))
            for name, fact in facts.items()
        }
        all_digests = self.exchange("program", digests, what=f"the agreement on {what}")
        for name, fact in facts.items():
            if len({worker.get(name) for worker in all_digests}) > 1:
                values = self.exchange("difference", fact)
                other = next(i for i, value in enumerate(values) if value != values[0])
                name, first, second = _difference(name, values[0], values[other])
                raise ClusterMismatchError(
                    f"the workers differ in {what}: {name} is {first!r} on "
                    f"{self.names[0]} and {second!r} on {self.names[other]}. All "
                    "workers must run the same script, arguments and versions."
                )
        self._num_agreements += 1
        return self._num_agreements

    def _listed(self, indices: Sequence[int]) -> str:
        return listed(
            f"{self.names[i]} ({self.addresses[i]})"
            if self.addresses[i]
            else self.names[i]
            for i in indices
        )


def _difference(name: str, a: JSON, b: JSON) -> tuple[str, JSON, JSON]:
    """Return the name and the values of the first entry in which two facts differ."""
    if isinstance(a, list) and isinstance(b, list):
        pairs = list(zip(a, b, strict=False))
        index = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        a, b = (x[index] if index < len(x) else "nothing" for x in (a, b))
        return f"{name}, entry {index}", a, b
    if isinstance(a, dict) and isinstance(b, dict):
        key = next(k for k in [*a, *b] if a.get(k) != b.get(k))
        return f"{name}, {key}", a.get(key), b.get(key)
    return name, a, b


@functools.lru_cache(maxsize=256)
def _exchange_of(name: str, what: str | None) -> Operation:
    return Operation(what or f"the exchange of {name!r}", f"exchange {name};".encode())


_current = Workers()


def current() -> Workers:
    """Return the workers of this process' cluster; without a cluster, one worker."""
    return _current


def set_current(workers: Workers) -> None:
    """Set the workers that `current` returns."""
    global _current
    _current = workers
