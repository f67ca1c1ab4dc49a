"""A user's own jitted training step, counted and watched as a step of `run`."""

import functools
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, ParamSpec, Protocol, TypeVar

import jax
from jax.extend.core import find_top_trace
from jax.stages import Lowered

from replicax._util.hashes import digest
from replicax._util.types import PyTree
from replicax._util.user_code import describe
from replicax._util.waiting import Announced
from replicax._version import versions
from replicax.cluster.dispatch_log import Operation
from replicax.cluster.workers import Workers
from replicax.engine.cache import static_key
from replicax.engine.composites import is_array
from replicax.engine.protocols import StrategyLike
from replicax.errors import ContextError

__all__ = ["Jitted", "WatchedStep", "agreed_program", "is_eager", "require_eager"]

P = ParamSpec("P")
T = TypeVar("T", covariant=True)


class Jitted(Protocol[P, T]):
    """A function compiled by `jax.jit`, or by a library's `jit` with `lower`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the compiled function."""
        ...

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Lower it for these arguments."""
        ...


class WatchedStep(Generic[P, T]):
    """A jitted step that all workers call; `lower` is that of the jitted function.

    Workers compare the program at the first call with new shapes. Later calls add an
    entry to the dispatch log, and communicate nothing.

    Args:
        step: The jitted function.
        strategy: Its strategy.
        num_steps: Number of training steps in a call.
    """

    def __init__(
        self, step: Jitted[P, T], strategy: StrategyLike, num_steps: int
    ) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step = step
        self._strategy = strategy
        self._num_steps = num_steps
        self._name = f"watch({describe(step)})"
        self._operations: dict[Hashable, Operation] = {}

    def __repr__(self) -> str:
        return f"<{self._name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the step as the next operation of all workers.

        Raises:
            ContextError: Inside a JAX transformation or a replica function.
        """
        require_eager("Strategy.watch")
        return self._strategy.runner.run_jitted(
            functools.partial(self._step, *args, **kwargs),
            functools.partial(self.lower, *args, **kwargs),
            functools.partial(self._operation, args, kwargs),
        )

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Lower the jitted function for these arguments."""
        lowered = self._step.lower(*args, **kwargs)
        return getattr(lowered, "lowered", lowered)  # Flax wraps JAX's.

    def _operation(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> Operation:
        """The entry of this call in the dispatch log."""
        workers = self._strategy.workers
        key: Hashable = None
        if workers.count > 1:
            leaves, structure = jax.tree.flatten((args, kwargs))
            key = structure, tuple(map(_kind, leaves))
        operation = self._operations.get(key)
        if operation is None:
            operation = self._operations[key] = agreed_program(
                workers,
                self._name,
                lambda: self.lower(*args, **kwargs),
                self._num_steps,
            )
        return operation


def _kind(leaf: PyTree) -> Hashable:
    """A leaf's part of the key by which a call selects its program."""
    if is_array(leaf):
        return leaf.shape, leaf.dtype
    # The value of a number is no part of the program, unless it is a boolean.
    return type(leaf) if type(leaf) in (int, float, complex) else static_key(leaf)


def is_eager() -> bool:
    """Whether this thread is in no JAX transformation, such as `jit` or `grad`."""
    return type(find_top_trace(())) is _eager_trace_type()


@functools.cache
def _eager_trace_type() -> type:
    """The type of JAX's trace outside of transformations, which has no public name."""
    with ThreadPoolExecutor(1) as pool:  # A new thread is in no transformation.
        return type(pool.submit(find_top_trace, ()).result())


def require_eager(caller: str) -> None:
    """Raise inside a JAX transformation, and so inside a replica function."""
    if not is_eager():
        raise ContextError(
            f"{caller}: called inside a replica function or a JAX transformation, such "
            "as jax.jit or jax.grad. Call it outside; inside, call your own function "
            "itself."
        )


def agreed_program(
    workers: Workers, name: str, lower: Callable[[], Lowered], num_steps: int = 0
) -> Operation:
    """Compare a program between workers before its first run; return its log entry.

    Raises:
        ClusterMismatchError: If the workers' programs differ.
    """
    if workers.count == 1:
        return Operation(name, b"", num_steps)
    with Announced(f"tracing {name}"):
        text = lower().as_text()
    facts = {"versions": versions(), "the program (its digest)": digest(text)}
    number = workers.agree(facts, f"the program of {name}")
    return Operation(name, f"program {number};".encode(), num_steps)
