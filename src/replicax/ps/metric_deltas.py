"""Sums metrics under a coordinator: workers send what each closure adds to them."""

import logging
from typing import Any

import jax
import numpy as np

from replicax._private import keras as internals
from replicax.engine.consistency import Label, Labels
from replicax.ps.payloads import decode, encode

__all__ = ["MetricDeltas"]

_logger = logging.getLogger("replicax")


class MetricDeltas:
    """The variables of aggregation `"sum"`, as those of metrics are.

    They are in each process. A worker tells by how much a closure has changed its own,
    and the chief adds that to its own, once for each closure that counts.

    Args:
        labels: This task's variables.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._seen: dict[Label, tuple[jax.Array, np.ndarray]] = {}
        self._before: dict[Label, np.ndarray] = {}
        self._unknown: set[Label] = set()
        self._touched: set[Label] = set()

    def begin(self) -> None:
        """A closure begins."""
        self._before = self._read()

    def changes(self) -> list[Any]:
        """What has changed since `begin`, as JSON values."""
        changes = []
        for label, now in self._read().items():
            before = self._before.get(label)
            if now is before:
                continue
            change = now if before is None else now - before
            if change.any():
                changes.append([*label, encode(change, label[0])])
        return changes

    def add(self, changes: list[Any]) -> None:
        """Add what closures have changed, one list after another."""
        totals: dict[Label, np.ndarray] = {}
        for path, number, change in changes:
            label = (path, number)
            totals[label] = totals.get(label, 0) + decode(change)
        for label, total in totals.items():
            variable = self._labels.find(label)
            if variable is not None:
                self._touched.add(label)
                value = np.asarray(variable.value) + total
                variable.assign(value.astype(variable.dtype))
            elif label not in self._unknown:
                self._unknown.add(label)
                _logger.warning(
                    "ClusterCoordinator: closures change %r, which the chief does not "
                    "have. Create metrics under strategy.scope() before they are "
                    "scheduled, in every task.",
                    label[0],
                )

    def values(self) -> list[Any]:
        """The chief's totals, as JSON values."""
        found = [(label, self._labels.find(label)) for label in sorted(self._touched)]
        return [
            [*label, encode(variable.value, label[0])]
            for label, variable in found
            if variable is not None
        ]

    def assign(self, values: list[Any]) -> None:
        """Take over the chief's totals."""
        for path, number, value in values:
            variable = self._labels.find((path, number))
            if variable is not None:
                variable.assign(decode(value))

    def _read(self) -> dict[Label, np.ndarray]:
        """Wide copies: programs give the arrays away, and sums of many are exact."""
        seen: dict[Label, tuple[jax.Array, np.ndarray]] = {}
        for label, variable in self._labels:
            if variable.aggregation != "sum" or not internals.has_value(variable):
                continue
            (stored,) = internals.read_values([variable])
            known = self._seen.get(label)
            if known is None or known[0] is not stored:
                host = np.asarray(stored)
                kind = np.float64 if np.issubdtype(host.dtype, np.inexact) else np.int64
                known = (stored, host.astype(kind))
            seen[label] = known
        self._seen = seen
        return {label: host for label, (_, host) in seen.items()}
