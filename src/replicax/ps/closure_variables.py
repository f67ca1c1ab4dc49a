"""What closures change in variables without an optimizer: metrics, and others."""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._private import keras as internals
from replicax.engine.consistency import Label, Labels
from replicax.engine.variables import Variable, is_seed_state
from replicax.ps.payloads import decode, encode
from replicax.ps.variables import RemoteVariables

__all__ = ["AssignedVariables", "MetricDeltas"]

_logger = logging.getLogger("replicax")


class AssignedVariables:
    """Variables such as a step counter, which servers store once a closure assigns one.

    A worker adds to a variable on its server by how much a closure has changed it, and
    fetches the newest value before its next closure. So the additions of all workers
    count, each once, and the chief and later closures see them. Metrics, and what steps
    change, such as trained variables, travel in other ways.
    """

    def __init__(self, remote: RemoteVariables, labels: Labels) -> None:
        self._remote = remote
        self._labels = labels
        self._before: dict[Label, jax.Array] = {}
        self._warned: set[Label] = set()

    def begin(self, *, is_fresh: bool) -> None:
        """Record all values at the begin of a closure.

        Args:
            is_fresh: Whether they are the newest; else those are fetched before.
        """
        for group in () if is_fresh else self._remote.assigned:
            group.pull()
            group.write()
        self._before = {
            label: internals.read_values([variable])[0]
            for label, variable in self._candidates()
        }

    def push(self) -> None:
        """Add the changes since `begin` to the values on the servers."""
        for label, variable in self._candidates():
            before = self._before.get(label)
            (now,) = internals.read_values([variable])
            if before is None or now is before or bool(jnp.array_equal(now, before)):
                continue
            if variable.dtype == "bool":
                self._warn_of(label)
                continue
            group = self._remote.connect_assigned(variable, before)
            group.finish(group.push([now - before], dict(group.versions), None))
            group.write()

    def _warn_of(self, label: Label) -> None:
        if label not in self._warned:
            self._warned.add(label)
            _logger.warning(
                "ClusterCoordinator: a function has assigned the bool variable %r, "
                "which stays on this worker: servers add up changes, and truth values "
                "have no sum. Make it an int32 variable.",
                label[0],
            )

    def _candidates(self) -> Iterator[tuple[Label, Variable]]:
        """Variables that closures may assign and that nothing else brings to others."""
        known = self._remote.variables_of_steps()
        for label, variable in self._labels:
            if (
                variable.aggregation != "sum"  # Those are metrics.
                and internals.has_value(variable)
                and id(variable) not in known
                and not is_seed_state(variable)
            ):
                yield label, variable


class MetricDeltas:
    """Deltas of the variables with aggregation `"sum"`, such as those of metrics.

    They are in each process. A worker tells by how much a closure has changed its own,
    and the chief adds that to its own, once for each closure that counts.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._seen: dict[Label, tuple[jax.Array, np.ndarray]] = {}
        self._before: dict[Label, np.ndarray] = {}
        self._unknown: set[Label] = set()
        self._touched: set[Label] = set()

    def begin(self) -> None:
        """Record the metrics' values at the begin of a closure."""
        self._before = self._read()

    def changes(self) -> list[Any]:
        """The differences since `begin`, as JSON values."""
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
        """Add the closures' deltas to the totals."""
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
        """Assign the chief's totals to the variables."""
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
