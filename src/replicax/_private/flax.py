"""Every private name of Flax that replicax uses, with its reason.

Flax is imported only where the user has imported it already.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state


@contextlib.contextmanager
def observed_reads(observe: Callable[[str, Any], None]) -> Generator[None]:
    """Call `observe(name, content)` before arrays of NNX objects from outside are read.

    An object is from outside if it was made before a trace in this block. Only reads of
    this thread are observed, and one block at a time may be entered. NNX has hooks for
    `get_value`, but `nnx.split`, `nnx.grad` and others read the content itself.
    """
    nnx = sys.modules["flax.nnx"]
    content = vars(nnx.Variable)["_raw_value"]
    outside = get_opaque_trace_state(convention="nnx")
    thread = threading.get_ident()

    def is_outside(state: Any) -> bool:
        return state.jax_trace == outside and threading.get_ident() == thread

    def read(variable: Any) -> Any:
        value = content.__get__(variable)
        if is_outside(variable._trace_state):
            observe(f"an NNX variable, {type(variable).__name__}", value)
        return value

    def read_attribute(node: Any, name: str) -> Any:
        value = object.__getattribute__(node, name)
        if isinstance(value, jax.Array | np.ndarray) and is_outside(
            node._pytree__state.trace_state
        ):
            observe(f"{type(node).__name__}.{name}", value)
        return value

    nnx.Variable._raw_value = property(read, content.__set__)
    nnx.Pytree.__getattribute__ = read_attribute
    try:
        yield
    finally:
        nnx.Variable._raw_value = content
        del nnx.Pytree.__getattribute__
