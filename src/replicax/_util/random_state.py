"""Captures and restores a process' random state: Python's and NumPy's generators.

Keras uses both, to shuffle and to seed its own generators.
"""

import random
from typing import Any, TypedDict

import numpy as np

from replicax._util.hashes import digest

__all__ = ["RandomState", "RandomStream", "capture", "fingerprint", "restore"]


class RandomState(TypedDict):
    """The states of `random` and of `numpy.random`; `json_codec` can encode them."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]


def capture() -> RandomState:
    """Return the present random state."""
    numpy: Any = np.random.get_state(legacy=False)
    return {"python": random.getstate(), "numpy": numpy}


def restore(state: RandomState) -> None:
    """Set the random state to a result of `capture`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def fingerprint() -> str:
    """Hash the random state; the hash of equal states is equal in all processes."""
    numpy = [np.asarray(part).tolist() for part in np.random.get_state()]
    return digest(repr((random.getstate(), numpy)))


class RandomStream:
    """A separate stream of random numbers.

    Inside its `with` block the process draws the stream's numbers; afterwards it
    continues with its own. Blocks may nest, and a later block continues the stream. The
    numbers depend on the stream's name, and on the random state when it is created.
    """

    def __init__(self, name: str) -> None:
        outside = capture()
        seed = int(digest(f"{name} {fingerprint()}", 4), 16)
        random.seed(seed)
        np.random.seed(seed)
        self._inside = capture()
        restore(outside)
        self._outside = outside
        self._depth = 0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._outside = capture()
            restore(self._inside)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._inside = capture()
            restore(self._outside)
