"""Captures and restores a process' random state: Python's and NumPy's generators.

Keras uses both, for shuffling and for seeding its own generators.
"""

import random
from typing import Any, TypedDict

import numpy as np

from replicax._util.hashes import digest

__all__ = ["RandomState", "capture", "fingerprint", "restore"]


class RandomState(TypedDict):
    """A random state, which `json_codec` can encode.

    Attributes:
        python: The result of `random.getstate`.
        numpy: The result of `numpy.random.get_state`.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any]


def capture() -> RandomState:
    """Return the present random state.

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
    """Set the random state to a result of `capture`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def fingerprint() -> str:
    """Hash the random state, the same in every process for equal states."""
    numpy = [np.asarray(part).tolist() for part in np.random.get_state()]
    return digest(repr((random.getstate(), numpy)))
