"""Programs on their way to the devices: one order for all threads, watched over."""

import functools
import threading
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

from replicax._util.types import PyTree, Shape
from replicax.cluster.dispatch_log import Operation
from replicax.cluster.workers import Workers
from replicax.engine.values import PerReplica

__all__ = ["Dispatcher"]

T = TypeVar("T")

# Threads may use strategies at once, but a program must be enqueued on all its devices
# before another is: devices that meet collectives in different orders wait for ever.
_dispatch_order = threading.RLock()


class Dispatcher:
    """Hands programs to the devices, and tells who watches over the workers.

    Args:
        workers: The processes that train together.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def dispatch(self, call: Callable[[], T], operation: Operation | None = None) -> T:
        """Call a program.

        Args:
            call: Calls it.
            operation: What the other workers know it by; None: they have no part in it.
        """
        watch = self._workers.watch
        with _dispatch_order:
            if watch is None or operation is None:
                return call()
            # Before and after: on CPUs, the call may itself wait for the others.
            watch.dispatching(operation)
            leaves: list[jax.Array] = []
            try:
                results = call()
                leaves = jax.tree.leaves(results)
            finally:
                watch.dispatched(leaves[0] if leaves else None)
        return results

    def combining(self, name: str, value: PyTree) -> Operation | None:
        """What combines the replicas' values in `value`; None: it is done here alone.

        A value that is no `PerReplica` needs no other worker.
        """
        if self._workers.watch is None:
            return None
        leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, PerReplica))
        kinds = tuple(
            (x.array.shape, x.array.dtype) for x in leaves if isinstance(x, PerReplica)
        )
        return _combination(name, kinds) if kinds else None


@functools.lru_cache(maxsize=256)
def _combination(name: str, kinds: tuple[tuple[Shape, np.dtype], ...]) -> Operation:
    listed = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
    return Operation(f"{name} of {listed}", f"{name} {listed};".encode())
