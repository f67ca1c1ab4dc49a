"""A synchronous step: its parts, added up as they come."""

import dataclasses
from collections.abc import Mapping

import numpy as np

__all__ = ["Round", "SyncPart"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncPart:
    """Which part of a synchronous step a push is.

    Attributes:
        step: Number of the step, from 0.
        part: Number of the part, from 0.
        num_parts: Number of parts that make the step.
        weight: Its weight in the mean of the parts; None: parts are summed.
    """

    step: int
    part: int
    num_parts: int
    weight: float | None = None


class Round:
    """The parts of one synchronous step, added up in their order as far as they go.

    The order makes the sum the same in every run, to the last bit.
    """

    def __init__(self, step: int, num_parts: int, weighted: bool) -> None:
        self.step = step
        self.num_parts = num_parts
        self.weighted = weighted
        self.pushers: dict[int, tuple[str, int]] = {}  # By part: worker, based_on.
        self.total: dict[str, np.ndarray] | None = None
        self.squared_norms: dict[str, float] | None = None
        self._weights = 0.0
        self._waiting: dict[int, tuple[Mapping[str, np.ndarray], float]] = {}
        self._next = 0

    @property
    def missing(self) -> list[int]:
        """The parts that are not there yet."""
        return [i for i in range(self.num_parts) if i not in self.pushers]

    def add(self, part: SyncPart, vectors: Mapping[str, np.ndarray]) -> None:
        """Take a part's gradients, which must not be changed afterwards."""
        self._waiting[part.part] = vectors, 1.0 if part.weight is None else part.weight
        while self._next in self._waiting:
            gradients, weight = self._waiting.pop(self._next)
            self._next += 1
            self._weights += weight
            first = self.total is None
            total = {} if self.total is None else self.total
            for dtype, gradient in gradients.items():
                # Gradients may come as bfloat16; sums are in the group's dtype.
                term = gradient.astype(np.dtype(dtype), copy=first)
                # NaN and infinity go through, as in Keras.
                with np.errstate(all="ignore"):
                    if weight != 1.0:
                        factor = term.dtype.type(weight)
                        term = np.multiply(term, factor, out=term if first else None)
                    if first:
                        total[dtype] = term
                    else:
                        total[dtype] += term
            self.total = total

    def gradients(self) -> dict[str, np.ndarray]:
        """The sum or the mean. All parts are there."""
        total = self.total or {}
        if self.weighted and self._weights != 1.0:
            for vector in total.values():
                with np.errstate(all="ignore"):
                    vector /= vector.dtype.type(self._weights)
        return total
