"""The random state of a process: of Python's and NumPy's generators.

Keras draws from both: it shuffles with them, and seeds its own generators.
"""

import random
from typing import Any, TypedDict

import numpy as np

from replicax._util.hashes import digest

__all__ = ["RandomState", "capture", "fingerprint", "restore"]


class RandomState(TypedDict):
    """A random state, of values that `json_codec` encodes.

    Attributes:
        python: What `random.getstate` returns.
        numpy: What `numpy.random.get_state` returns.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]


def capture() -> RandomState:
    """The random state now.

    Example:
        >>> state = capture()
        >>> before = random.random(), np.random.rand()
        >>> restore(state)
        >>> before == (random.random(), np.random.rand())
        True
    """
    numpy: Any = np.random.get_state(legacy=False)
    return {"python": random.getstate(), "numpy": numpy}


def restore(state: RandomState) -> None:
    """Go back to a state that `capture` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def fingerprint() -> str:
    """A hash of the random state, in every process the same for equal states."""
    numpy = [np.asarray(part).tolist() for part in np.random.get_state()]
    return digest(repr((random.getstate(), numpy)))
