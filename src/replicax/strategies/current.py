"""The current strategy and the current replica context; the default strategy."""

import functools
from typing import Any

import jax

from replicax.engine.devices import before_start
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import current_context, current_strategy
from replicax.errors import ContextError
from replicax.strategies.strategy import Strategy

__all__ = [
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


class DefaultStrategy(Strategy):
    """The strategy outside any scope: one replica on JAX's default device.

    Unlike the others, it also uses variables that were created outside any scope.
    """

    _adopts = True

    def __init__(self) -> None:
        before_start()
        super().__init__(jax.local_devices()[:1])


@functools.cache
def _default_strategy() -> DefaultStrategy:
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """Return the strategy in scope, or the default one of a single replica.

    (TF: `tf.distribute.get_strategy`.)

    Returns:
        The strategy; also in a replica function that it runs.

    Example:
        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     inside = rx.get_strategy()
        >>> inside is strategy, rx.get_strategy().num_replicas_in_sync
        (True, 1)
    """
    context = current_context()
    strategy = current_strategy() if context is None else context.strategy
    if strategy is None:
        return _default_strategy()
    assert isinstance(strategy, Strategy)
    return strategy


def has_strategy() -> bool:
    """Whether a strategy's scope is open in this thread.

    (TF: `tf.distribute.has_strategy`.)

    Example:
        >>> import replicax as rx
        >>> with rx.OneDeviceStrategy("cpu:0").scope():
        ...     inside = rx.has_strategy()
        >>> inside, rx.has_strategy()
        (True, False)
    """
    return current_strategy() is not None


def in_cross_replica_context() -> bool:
    """Whether this code is inside a scope but not in a replica function.

    (TF: `tf.distribute.in_cross_replica_context`.)

    Example:
        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     outside = rx.in_cross_replica_context()
        ...     inside = strategy.run(lambda: rx.in_cross_replica_context())
        >>> outside, bool(inside)
        (True, False)
    """
    return has_strategy() and current_context() is None


class _NoReplicaContext:
    """The context outside replica functions: it is false, and its attributes raise."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself looks for a protocol.
            raise AttributeError(name)
        raise ContextError(
            f"get_replica_context().{name}: used outside a replica function. Use it in "
            "the function for strategy.run; outside, combine the results of run with "
            "strategy.reduce or strategy.gather."
        )


_no_context: Any = _NoReplicaContext()


def get_replica_context() -> ReplicaContext:
    """Return the context of the running replica function.

    (TF: `tf.distribute.get_replica_context`.)

    Returns:
        The context. Outside a replica function, an object that is false and whose use
        raises `ContextError`.

    Example:
        >>> import replicax as rx
        >>> def step(x):
        ...     return rx.get_replica_context().all_reduce("sum", x)
        >>> strategy = rx.OneDeviceStrategy("cpu:0")
        >>> strategy.run(step, args=(2.0,)).item()
        2.0
    """
    return current_context() or _no_context
