"""Requests for groups of variables, which workers of a coordinator ask the chief for.

The chief creates all groups, and runs no closures: so it does not know which groups
these train. A worker puts a request on the board, in the place of the next number that
is free, and all tasks adopt the groups in the order of these numbers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import msgspec

from replicax._util.hashes import digest
from replicax.engine.consistency import Label, Labels
from replicax.errors import ClusterMismatchError
from replicax.ps.partition import AVERAGED, SUMMED, VariableGroup
from replicax.ps.session import Session

if TYPE_CHECKING:
    from replicax.ps.variables import RemoteVariables

__all__ = ["GroupRequests"]


class _GroupRequest(msgspec.Struct):
    """A worker's request for a group; variables are by their labels."""

    group: VariableGroup
    by: str
    variables: list[Label]
    count: Label | None
    rate: Label | None


class GroupRequests:
    """The queue of workers' requests for groups, which the chief serves."""

    def __init__(
        self, session: Session, labels: Labels, remote: "RemoteVariables"
    ) -> None:
        self._session = session
        self._labels = labels
        self._remote = remote
        self._next = 0

    def name_of(
        self,
        label: str,
        variables: Sequence[keras.Variable],
        count: keras.Variable | None,
    ) -> str:
        """Name a group by its contents, in whichever order groups are needed."""
        named = variables if count is None else [*variables, count]
        return f"{label} {digest(repr([self._labels.of(v) for v in named]), 4)}"

    def ask(
        self,
        group: VariableGroup,
        variables: Sequence[keras.Variable],
        count: keras.Variable | None,
        rate: keras.Variable | None,
    ) -> int | None:
        """Request a group from the chief, once.

        `count` is the number of steps of the optimizer that trains it, `rate` its
        learning rate, where these are variables. Of moving statistics the number of an
        earlier request that has some of them: then nothing is requested.
        """
        of = self._labels.of
        request = _GroupRequest(
            group,
            self._session.name,
            [of(v) for v in variables],
            None if count is None else of(count),
            None if rate is None else of(rate),
        )
        want = msgspec.to_builtins(request)
        number = self._next
        while True:
            stands = self._session.board("put", key=_request_key(number), value=want)
            if stands["group"]["name"] == group.name:
                return None
            labels = {tuple(label) for label in stands["variables"]}
            is_alike = stands["group"]["rule"] == group.rule
            is_alike &= group.rule in (AVERAGED, SUMMED)
            if is_alike and not labels.isdisjoint(request.variables):
                return number
            number += 1

    def adopt_until(self, number: int) -> None:
        """Wait until the group of a request is adopted."""

        def poll() -> bool | None:
            self.adopt()
            return self._next > number or None

        chief = self._session.workers[0]
        self._session.wait(poll, "a group of moving statistics", lambda: chief)

    def adopt(self) -> None:
        """Adopt requested groups; the chief creates them first."""
        while found := self._session.board("get", key=_request_key(self._next)):
            want = msgspec.convert(found, _GroupRequest)
            variables: list[keras.Variable] = []
            for label in want.variables:
                variable = self._labels.find(label)
                if variable is None and self._session.is_chief:
                    raise ClusterMismatchError(
                        f"ClusterCoordinator: a closure on {want.by} changes "
                        f"{label[0]!r}, which the chief does not have. Create models "
                        "under strategy.scope() and build them (a keras.Input, or "
                        "model.build) before the first coordinator.schedule, in every "
                        "task."
                    )
                if variable is None:
                    return  # This script is not there yet.
                variables.append(variable)
            count = self._find(want.count)
            group = self._remote.adopt(want.group, variables, count)
            if group is None:
                return
            self._next += 1
            if group.optimizer is not None:
                group.optimizer.watch(count, self._find(want.rate))

    def _find(self, label: Label | None) -> keras.Variable | None:
        return None if label is None else self._labels.find(label)


def _request_key(number: int) -> str:
    return f"wanted group: {number}"
