"""The thread's current strategy, public call and replica context."""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar

import jax

from replicax._private.keras import current_scope, set_current_scope
from replicax.engine.protocols import StrategyLike
from replicax.errors import ContextError

if TYPE_CHECKING:
    from replicax.engine.replica import ReplicaContext

__all__ = [
    "Scope",
    "called_in",
    "current_call",
    "current_context",
    "current_strategy",
    "entered_context",
    "outside_meshes",
    "outside_scopes",
    "recorded_by",
    "required_context",
]


# Parts of the key of JAX's caches: traces of functions that the user jits depend on the
# replica context and on whether a tape records. A part that is added later changes all
# keys: JAX would compile each function again, in a call that an interrupt could stop.
_traced_in = jax.make_user_context(None)
recorded_by = jax.make_user_context(None)

T = TypeVar("T")


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.context: ReplicaContext | None = None
        self.strategies: tuple[StrategyLike, ...] = ()  # Innermost last.
        self.call = "run"


_state = _ThreadState()


def current_context() -> "ReplicaContext | None":
    """The `ReplicaContext` of the replica function traced in this thread, or None."""
    return _state.context


def required_context() -> "ReplicaContext":
    """The current `ReplicaContext`; a ContextError outside a replica function."""
    if _state.context is None:
        raise ContextError("Called outside a replica function. Use strategy.run.")
    return _state.context


def current_strategy() -> StrategyLike | None:
    """The strategy whose scope this thread is in, or None."""
    return _state.strategies[-1] if _state.strategies else None


def current_call() -> str:
    """The method that the user called, for messages, such as `"evaluate"`."""
    return _state.call


@contextlib.contextmanager
def entered_context(context: "ReplicaContext | None") -> Generator[None]:
    """Make `context` the thread's replica context; None hides an outer one."""
    outer, _state.context = _state.context, context
    try:
        with _traced_in(None if context is None else context.trace_key):
            yield
    finally:
        _state.context = outer


@contextlib.contextmanager
def outside_scopes() -> Generator[None]:
    """Leave the strategies' scopes: objects created inside belong to no strategy."""
    outer, _state.strategies = _state.strategies, ()
    try:
        yield
    finally:
        _state.strategies = outer


def outside_meshes(call: Callable[[], T]) -> T:
    """Call a function without the user's mesh (`jax.set_mesh`).

    Programs use their strategy's mesh, which JAX refuses while another is current.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:  # Inside a program, it is the strategy's mesh.
        return call()
    with jax.set_mesh(None):
        return call()


def called_in(
    strategy: StrategyLike, call: Callable[[], T], user_call: str | None = None
) -> T:
    """Call a function in a strategy's scope; messages name the method `user_call`.

    The thread's state is restored afterwards, even if a KeyboardInterrupt stopped the
    `__exit__` of a `with` statement inside the function.

    Raises:
        ContextError: Inside the scope of another strategy.
    """
    strategies, context, outer = _state.strategies, _state.context, _state.call
    scope = current_scope()
    _require_no_other_scope(strategy)
    try:
        _state.call = user_call or outer
        _state.strategies = (*strategies, strategy)
        return outside_meshes(call)
    except BaseException:
        if current_scope() is not scope:
            set_current_scope(scope)
        raise
    finally:
        _state.strategies, _state.context, _state.call = strategies, context, outer


def _require_no_other_scope(strategy: StrategyLike) -> None:
    outer = current_strategy()
    if outer is not None and outer is not strategy:
        raise ContextError(
            f"{strategy!r}.scope: already inside the scope of {outer!r}. One program "
            "has one strategy; leave the outer scope first."
        )


class Scope:
    """The context of `with strategy.scope():`; reentrant."""

    def __init__(self, strategy: StrategyLike) -> None:
        self._strategy = strategy

    def __enter__(self) -> StrategyLike:
        _require_no_other_scope(self._strategy)
        _state.strategies = (*_state.strategies, self._strategy)
        return self._strategy

    def __exit__(self, *exc_info: object) -> None:
        _state.strategies = _state.strategies[:-1]
