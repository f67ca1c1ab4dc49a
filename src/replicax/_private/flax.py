"""Every private name of Flax that replicax uses, with its reason.

Flax is imported only where the user has imported it already.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

from jax.extend.core import get_opaque_trace_state


@contextlib.contextmanager
def observed_reads(observe: Callable[[str, Any], None]) -> Generator[None]:
    """Call `observe(type, content)` before NNX variables from outside are read.

    These are variables that were made before a trace of this block, which this thread
    reads in it. One block at a time may be entered. NNX has hooks for reads by
    `get_value`, but `nnx.split`, `nnx.grad` and others read the content itself.
    """
    nnx = sys.modules["flax.nnx"]
    content = vars(nnx.Variable)["_raw_value"]
    outside = get_opaque_trace_state(convention="nnx")
    thread = threading.get_ident()

    def read(variable: Any) -> Any:
        value = content.__get__(variable)
        is_outside = variable._trace_state.jax_trace == outside
        if is_outside and threading.get_ident() == thread:
            observe(type(variable).__name__, value)
        return value

    nnx.Variable._raw_value = property(read, content.__set__)
    try:
        yield
    finally:
        nnx.Variable._raw_value = content
