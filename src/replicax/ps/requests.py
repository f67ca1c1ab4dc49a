"""Requests for groups: workers ask the chief to create those that they train.

A closure's first step shows which variables an optimizer trains. Only the worker that
runs it knows, and only the chief's initial values count: so the worker asks the chief.
The other workers hear of it too, and evaluate with the values that are trained.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import keras
import numpy as np

from replicax._private import keras as internals
from replicax._util.hashes import digest
from replicax._util.types import JSONObject
from replicax.engine.consistency import Labels
from replicax.errors import ClusterMismatchError
from replicax.ps.session import Session
from replicax.ps.variable_slices import VariableGroup

if TYPE_CHECKING:
    from replicax.ps.remote import RemoteGroup
    from replicax.ps.variables import RemoteVariables

__all__ = ["GroupRequests"]


@dataclasses.dataclass
class _Trained:
    """A group that an optimizer trains.

    Attributes:
        group: The `RemoteGroup`.
        iterations: The optimizer's count of updates.
        rate: Its learning rate, if it is a variable.
        known: The array of the rate that the servers have.
    """

    group: "RemoteGroup"
    iterations: keras.Variable | None
    rate: keras.Variable | None
    known: jax.Array | None


class GroupRequests:
    """What workers ask for, in the order of the asking.

    Args:
        session: This worker's session.
        labels: This task's variables.
    """

    def __init__(self, session: Session, labels: Labels) -> None:
        self._session = session
        self._labels = labels
        self._next = 0
        self._trained: list[_Trained] = []

    def name_of(
        self,
        label: str,
        variables: list[keras.Variable],
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> str:
        """A group's name, which is the same whoever needs which group first."""
        labels = [self._labels.of(v) for v in variables]
        if optimizer is not None:
            labels.append(self._labels.of(optimizer.iterations))
        number = digest(repr(labels), 4)
        return f"{label} {number}"

    def ask(
        self,
        group: VariableGroup,
        variables: list[keras.Variable],
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
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
        number = self._next
        while True:
            key = _key(number)
            stands = self._session.board("put", key=key, value=want)
            if stands["group"]["name"] == group.name:
                return
            number += 1

    def adopt(self, remote: "RemoteVariables") -> None:
        """Take over what was asked for: the chief creates it, the others have it then.

        Args:
            remote: This task's `RemoteVariables`.

        Raises:
            ClusterMismatchError: If the chief has no such variables.
        """
        while True:
            want = self._session.board("get", key=_key(self._next))
            if want is None:
                return
            variables = [self._labels.find((p, n)) for p, n in want["variables"]]
            if any(v is None for v in variables):
                self._require_worker(want, variables)
                return  # This script is not there yet.
            group = remote.adopt(VariableGroup.from_json(want["group"]), variables)
            if group is None:
                return
            self._next += 1
            if want["iterations"] is not None:
                self._follow(group, want)

    def _follow(self, group: "RemoteGroup", want: JSONObject) -> None:
        iterations = self._labels.find(tuple(want["iterations"]))
        rate = None
        if want["rate"] is not None:
            rate = self._labels.find(tuple(want["rate"]))
        known = None if rate is None else _stored(rate)
        self._trained.append(_Trained(group, iterations, rate, known))

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
        """Optimizers count the updates that the servers made."""
        for trained in self._trained:
            if trained.iterations is not None:
                trained.iterations.assign(max(trained.group.versions.values()))

    def _require_worker(
        self, want: JSONObject, variables: list[keras.Variable | None]
    ) -> None:
        if not self._session.is_chief:
            return
        missing = want["variables"][variables.index(None)][0]
        raise ClusterMismatchError(
            f"ClusterCoordinator: a closure on {want['by']} trains {missing!r}, which "
            "the chief does not have. Create models under strategy.scope() and build "
            "them (a keras.Input, or model.build) before the first "
            "coordinator.schedule, in every task."
        )


def _key(number: int) -> str:
    return f"wanted group: {number}"


def _stored(variable: keras.Variable) -> jax.Array:
    return internals.read_values([variable])[0]
