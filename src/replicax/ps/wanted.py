"""Groups that workers need while the chief runs no step itself.

A closure's first step shows which variables an optimizer trains. Only the worker that
runs it knows, and only the chief's initial values count: so the worker asks the chief.
"""

import dataclasses
import hashlib
from typing import Any

import keras
import numpy as np

from replicax.errors import ClusterMismatchError
from replicax.keras import internals
from replicax.ps.groups import Group
from replicax.ps.labels import Labels
from replicax.ps.session import Session

__all__ = ["WantedGroups"]


@dataclasses.dataclass
class _Trained:
    """A group with an optimizer, as the chief has it."""

    group: Any
    iterations: Any
    rate: Any
    known: Any


class WantedGroups:
    """What workers ask of the chief, in the order of the asking.

    Args:
        session: This worker's session.
        labels: This task's variables.
    """

    def __init__(self, session: Session, labels: Labels) -> None:
        self._session = session
        self._labels = labels
        self._next = 0
        self._trained: list[_Trained] = []

    def name_of(self, label: str, variables: list[Any], optimizer: Any = None) -> str:
        """A group's name, which is the same whoever needs which group first."""
        labels = [self._labels.of(v) for v in variables]
        if optimizer is not None:
            labels.append(self._labels.of(optimizer.iterations))
        digest = hashlib.blake2b(repr(labels).encode(), digest_size=4).hexdigest()
        return f"{label} {digest}"

    def ask(self, group: Group, variables: list[Any], optimizer: Any = None) -> None:
        """Have the chief create a group, unless it has or somebody has asked."""
        rate = getattr(optimizer, "_learning_rate", None)
        want = {
            "group": group.to_json(),
            "by": self._session.name,
            "variables": [self._labels.of(v) for v in variables],
            "iterations": None
            if optimizer is None
            else self._labels.of(optimizer.iterations),
            "rate": self._labels.of(rate) if isinstance(rate, keras.Variable) else None,
        }
        while True:
            stands = self._session.board("put", key=self._key, value=want)
            self._next += 1
            if stands["group"]["name"] == group.name:
                return

    def serve(self, remote: Any) -> None:
        """The chief: create what was asked for, in its `RemoteVariables`.

        Raises:
            ClusterMismatchError: If the chief has no such variables.
        """
        while True:
            want = self._session.board("get", key=self._key)
            if want is None:
                return
            self._next += 1
            group = remote.adopt(
                Group.from_json(want["group"]),
                [self._find(label, want["by"]) for label in want["variables"]],
            )
            if want["iterations"] is not None:
                rate = None
                if want["rate"] is not None:
                    rate = self._labels.find(tuple(want["rate"]))
                self._trained.append(
                    _Trained(
                        group,
                        self._labels.find(tuple(want["iterations"])),
                        rate,
                        None if rate is None else _stored(rate),
                    )
                )

    def send_rates(self) -> None:
        """The chief: learning rates that were assigned go to the servers."""
        for trained in self._trained:
            if trained.rate is None:
                continue
            value = _stored(trained.rate)
            if value is not trained.known:
                trained.known = value
                trained.group.assign_rate(float(np.asarray(value)))

    def write_iterations(self) -> None:
        """The chief: optimizers count the updates that the servers made."""
        for trained in self._trained:
            if trained.iterations is not None:
                trained.iterations.assign(max(trained.group.versions.values()))

    @property
    def _key(self) -> str:
        return f"wanted group: {self._next}"

    def _find(self, label: list[Any], worker: str) -> Any:
        variable = self._labels.find((label[0], label[1]))
        if variable is None:
            raise ClusterMismatchError(
                f"ClusterCoordinator: a closure on {worker} trains {label[0]!r}, which "
                "the chief does not have. Create models under strategy.scope() and "
                "build them (a keras.Input, or model.build) before the first "
                "coordinator.schedule, in every task."
            )
        return variable


def _stored(variable: Any) -> Any:
    return internals.read_values([variable])[0]
