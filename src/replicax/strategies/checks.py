"""Checks of the arguments of strategies and of `Strategy.run`."""

import functools

import jax
import jax.core
from jax.extend.core import find_top_trace

from replicax.engine.collectives import CrossDeviceOps
from replicax.errors import ContextError

__all__ = ["check_call", "check_options", "refuse_tracer", "refuse_tracing"]


def check_call(fn: object, args: object) -> None:
    """Raise unless `fn` can be called and `args` are its arguments."""
    if not callable(fn):
        raise TypeError(f"Strategy.run: fn must be callable; got {fn!r}.")
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"Strategy.run: args must be a tuple or list; got a {type(args).__name__}. "
            "For one argument x write args=(x,)."
        )


def refuse_tracer(array: object) -> None:
    """Raise if `array` is what a JAX transformation traces with."""
    if isinstance(array, jax.core.Tracer):
        raise _inside_a_transformation()


def refuse_tracing() -> None:
    """Raise if this thread is in the trace of a function that JAX will compile."""
    if type(find_top_trace(())) is _kind_of_trace():
        raise _inside_a_transformation()


@functools.cache
def _kind_of_trace() -> type:
    found: list[type] = []
    jax.make_jaxpr(lambda: found.append(type(find_top_trace(()))))()
    return found[0]


def _inside_a_transformation() -> ContextError:
    return ContextError(
        "Strategy.run: called inside a JAX transformation such as jax.jit. "
        "run compiles by itself; take the decorator away (like @tf.function)."
    )


def check_options(
    name: str,
    cross_device_ops: object,
    check_replicas_every: int | None,
    replicas_per_device: int,
) -> None:
    """Refuse arguments of a strategy, called `name`, that cannot be."""
    if cross_device_ops is not None and not isinstance(
        cross_device_ops, CrossDeviceOps
    ):
        raise TypeError(
            f"{name}: cross_device_ops must be a rx.CrossDeviceOps; got "
            f"{cross_device_ops!r}. Use for example rx.HierarchicalCopyAllReduce()."
        )
    if check_replicas_every is not None and check_replicas_every < 1:
        raise ValueError(
            f"{name}: check_replicas_every must be at least 1 or "
            f"None; got {check_replicas_every!r}."
        )
    if type(replicas_per_device) is not int or replicas_per_device < 1:
        raise ValueError(
            f"{name}: replicas_per_device must be a positive "
            f"integer; got {replicas_per_device!r}."
        )
