"""Requests for groups: workers ask the chief to create those that they train.

A closure's first step shows which variables an optimizer trains. Only the worker that
runs it knows, and only the chief's initial values count: so the worker asks the chief.
The other workers hear of it too, and evaluate with the values that are trained.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras

from replicax._util.hashes import digest
from replicax._util.types import JSONObject
from replicax.engine.consistency import Labels
from replicax.errors import ClusterMismatchError
from replicax.ps.session import Session
from replicax.ps.variable_slices import VariableGroup

if TYPE_CHECKING:
    from replicax.ps.variables import RemoteVariables

__all__ = ["GroupRequests"]


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

    def name_of(
        self,
        label: str,
        variables: Sequence[keras.Variable],
        count: keras.Variable | None,
    ) -> str:
        """A group's name, which is the same whoever needs which group first."""
        named = variables if count is None else [*variables, count]
        return f"{label} {digest(repr([self._labels.of(v) for v in named]), 4)}"

    def ask(
        self,
        group: VariableGroup,
        variables: Sequence[keras.Variable],
        count: keras.Variable | None,
        rate: keras.Variable | None,
    ) -> None:
        """Have the chief create a group, unless it has or somebody has asked.

        Args:
            group: What lies where.
            variables: The group's.
            count: The number of steps of the optimizer that trains them; None: none.
            rate: Its learning rate, where that is a variable.
        """
        want = {
            "group": group.to_json(),
            "by": self._session.name,
            "variables": [self._labels.of(v) for v in variables],
            "count": None if count is None else self._labels.of(count),
            "rate": None if rate is None else self._labels.of(rate),
        }
        number = self._next
        while True:
            stands = self._session.board("put", key=_key(number), value=want)
            if stands["group"]["name"] == group.name:
                return
            number += 1

    def adopt(self, remote: "RemoteVariables") -> None:
        """Take over what was asked for: the chief creates it, the others have it then.

        Raises:
            ClusterMismatchError: If the chief has no such variables.
        """
        while (want := self._session.board("get", key=_key(self._next))) is not None:
            variables = [self._labels.find((p, n)) for p, n in want["variables"]]
            if any(v is None for v in variables):
                if self._session.is_chief:
                    raise _unknown(want, want["variables"][variables.index(None)][0])
                return  # This script is not there yet.
            group = remote.adopt(VariableGroup.from_json(want["group"]), variables)
            if group is None:
                return
            self._next += 1
            group.train(self._find(want["count"]), self._find(want["rate"]))

    def _find(self, label: tuple[str, int] | None) -> keras.Variable | None:
        return None if label is None else self._labels.find((label[0], label[1]))


def _unknown(want: JSONObject, path: str) -> ClusterMismatchError:
    return ClusterMismatchError(
        f"ClusterCoordinator: a closure on {want['by']} trains {path!r}, which "
        "the chief does not have. Create models under strategy.scope() and build "
        "them (a keras.Input, or model.build) before the first "
        "coordinator.schedule, in every task."
    )


def _key(number: int) -> str:
    return f"wanted group: {number}"
