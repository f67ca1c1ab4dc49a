"""How changes that closures make to variables reach all tasks.

- Variables that training steps change, such as weights, are in groups on the servers.
  The chief creates groups but runs no closures, so workers request groups by
  `GroupRequests`. The script builds all models in every task.
- Each process has its own metrics. A closure's result carries the changes of metrics to
  the chief, and the chief sends the totals to all tasks.
- Any other variable becomes a group of its own when a closure first assigns it. Workers
  add their changes to that group.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import msgspec
import numpy as np

from replicax._private import keras as internals
from replicax._util.hashes import digest
from replicax.engine.labels import Label, Labels
from replicax.engine.variables import Variable, is_seed_state
from replicax.errors import ClusterMismatchError
from replicax.ps.partition import ADDED, VariableGroup
from replicax.ps.payloads import decode, encode
from replicax.ps.session import Session
from replicax.ps.variables import RemoteVariables

__all__ = ["ClosureVariables", "GroupRequests"]

_logger = logging.getLogger("replicax")


class ClosureVariables:
    """Variables that closures change and training steps do not.

    - Metrics, the variables with aggregation `"sum"`: a worker reports how a closure
      has changed its variable. The chief adds the change to its own variable, once per
      closure.
    - Other variables, such as a step counter: servers store the variable after a
      closure first assigns it. A worker adds its change there, and pulls the newest
      value before its next closure. So the chief and later closures see the changes of
      all workers.
    """

    def __init__(self, remote: RemoteVariables, labels: Labels) -> None:
        self._remote = remote
        self._labels = labels
        self._before: dict[Label, jax.Array] = {}
        self._warned: set[Label] = set()
        self._touched: set[Label] = set()

    def record(self, *, is_fresh: bool) -> None:
        """Record all values before a closure runs.

        Args:
            is_fresh: Whether the values are current; otherwise they are pulled first.
        """
        for group in () if is_fresh else self._remote.assigned:
            group.pull()
            group.write()
        self._before = {label: _value(v) for label, v in self._candidates()}

    def send_changes(self) -> list[Any]:
        """Send changes since `record` to the servers; return changes of metrics."""
        changes = []
        for label, variable in self._candidates():
            before, now = self._before.get(label), _value(variable)
            if now is before:
                continue
            if variable.aggregation == "sum":
                change = _wide(now) - (0 if before is None else _wide(before))
                if change.any():
                    changes.append([*label, encode(change, label[0])])
            elif before is not None and not bool(jnp.array_equal(now, before)):
                self._push(label, variable, before, now)
        self._before = {}
        return changes

    def _push(
        self, label: Label, variable: Variable, before: jax.Array, now: jax.Array
    ) -> None:
        if variable.dtype == "bool":
            self._warn_once(
                label,
                "a function has assigned the bool variable %r. The value stays on this "
                "worker: servers add up changes, and bools have no sum. Use an int32 "
                "variable.",
            )
            return
        group = self._remote.connect_assigned(variable, before)
        group.await_push(group.push([now - before], group.versions))
        group.write()

    def _warn_once(self, label: Label, text: str) -> None:
        if label not in self._warned:
            self._warned.add(label)
            _logger.warning(f"ClusterCoordinator: {text}", label[0])

    def _candidates(self) -> Iterator[tuple[Label, Variable]]:
        """Metrics, and variables that closures may assign but training does not."""
        trained = self._remote.variables_of_steps()
        for label, variable in self._labels:
            is_metric = variable.aggregation == "sum"
            is_own = id(variable) not in trained and not is_seed_state(variable)
            if internals.has_value(variable) and (is_metric or is_own):
                yield label, variable

    def add(self, changes: list[Any]) -> None:
        """On the chief, add closures' changes to its own metrics."""
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
            else:
                self._warn_once(
                    label,
                    "closures change %r, which the chief does not have. Create metrics "
                    "under strategy.scope() before they are scheduled, in every task.",
                )

    def values(self) -> list[Any]:
        """The metrics that closures have changed, as JSON values."""
        touched = [(x, self._labels.find(x)) for x in sorted(self._touched)]
        return [
            [*label, encode(variable.value, label[0])]
            for label, variable in touched
            if variable is not None
        ]

    def assign(self, values: list[Any]) -> None:
        """Assign the chief's values of metrics."""
        for path, number, value in values:
            variable = self._labels.find((path, number))
            if variable is not None:
                variable.assign(decode(value))


def _value(variable: Variable) -> jax.Array:
    return internals.read_values([variable])[0]


def _wide(value: jax.Array) -> np.ndarray:
    """Copy a value to the host, in a dtype wide enough for sums of many values."""
    host = np.asarray(value)
    kind = np.float64 if np.issubdtype(host.dtype, np.inexact) else np.int64
    return host.astype(kind)


class _GroupRequest(msgspec.Struct):
    """A worker's request for a group; `variables` has the labels of its variables.

    `numbers` are the labels of the optimizer's iterations and learning rate.
    """

    group: VariableGroup
    by: str
    variables: list[Label]
    numbers: list[Label | None]


class GroupRequests:
    """The queue of workers' requests for groups, which the chief serves.

    A worker puts a request on the board under the next free number. All tasks adopt
    the groups in the order of these numbers, after the chief.
    """

    def __init__(
        self, session: Session, labels: Labels, remote: RemoteVariables
    ) -> None:
        self._session = session
        self._labels = labels
        self._remote = remote
        # The script of a restarted chief may build the variables later.
        self._is_back = session.starts > 1
        self._next = 0

    def name_of(
        self,
        label: str,
        variables: Sequence[keras.Variable],
        count: keras.Variable | None,
    ) -> str:
        """Name a group after its contents, so that all tasks use the same name."""
        named = variables if count is None else [*variables, count]
        return f"{label} {digest(repr([self._labels.of(v) for v in named]), 4)}"

    def ask(
        self,
        group: VariableGroup,
        variables: Sequence[keras.Variable],
        numbers: Sequence[keras.Variable | None],
    ) -> bool:
        """Request a group from the chief, unless it was requested before.

        `numbers` are the optimizer's iterations and learning rate, if they are
        variables. Returns False if an earlier request already has some of the moving
        statistics; this task has then adopted the group of that request.
        """
        of = self._labels.of
        request = _GroupRequest(
            group,
            self._session.name,
            [of(v) for v in variables],
            [None if v is None else of(v) for v in numbers],
        )
        value = msgspec.to_builtins(request)
        number = self._next
        while True:
            stored = self._session.board("put", key=_request_key(number), value=value)
            if stored["group"]["name"] == group.name:
                return True
            labels = {tuple(label) for label in stored["variables"]}
            is_alike = stored["group"]["rule"] == group.rule == ADDED
            if is_alike and not labels.isdisjoint(request.variables):
                self._adopt_until(number)
                return False
            number += 1

    def _adopt_until(self, number: int) -> None:
        def poll() -> bool | None:
            self.adopt()
            return self._next > number or None

        chief = self._session.workers[0]
        self._session.wait(poll, "a group of moving statistics", lambda: chief)

    def adopt(self) -> None:
        """Adopt requested groups; the chief creates them first."""
        while value := self._session.board("get", key=_request_key(self._next)):
            request = msgspec.convert(value, _GroupRequest)
            variables: list[keras.Variable] = []
            for label in request.variables:
                variable = self._labels.find(label)
                if variable is None and self._session.is_chief and not self._is_back:
                    raise ClusterMismatchError(
                        f"ClusterCoordinator: a closure on {request.by} changes "
                        f"{label[0]!r}, which the chief does not have. Create models "
                        "under strategy.scope() and build them (a keras.Input, or "
                        "model.build) before the first coordinator.schedule, in every "
                        "task."
                    )
                if variable is None:
                    return  # This script has not built it yet.
                variables.append(variable)
            count, rate = (x and self._labels.find(x) for x in request.numbers)
            group = self._remote.adopt(request.group, variables, count)
            if group is None:
                return
            self._next += 1
            if group.optimizer is not None:
                group.optimizer.watch(count, rate)


def _request_key(number: int) -> str:
    return f"wanted group: {number}"
