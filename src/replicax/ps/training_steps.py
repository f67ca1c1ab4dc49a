"""A worker's training steps on servers: pushes each step's gradients.

Between steps at most one push is in flight, the last step's. `settle` waits for this
push; call `settle` before using the new values or the step count.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from replicax.ps.remote import GroupPush, RemoteGroup
from replicax.ps.rows import RemoteTables
from replicax.ps.session import Session

__all__ = ["GroupStep", "TrainingSteps"]


class GroupStep(NamedTuple):
    """A group of a step, and by server the versions that its gradients are based on."""

    group: RemoteGroup
    based_on: Mapping[int, int]


class TrainingSteps:
    """The training steps of this worker, one after another.

    With `overlap` a push is still in flight when the next step begins.
    """

    def __init__(self, session: Session, rows: RemoteTables, *, overlap: bool) -> None:
        self._session = session
        self._rows = rows
        self.overlap = overlap
        self._in_flight: list[tuple[RemoteGroup, GroupPush]] = []

    def push(
        self,
        steps: Sequence[GroupStep],
        gradients: Sequence[Sequence[jax.Array]],
        *,
        looks_up: bool,
    ) -> None:
        """Push each group's gradients, and the gradients of its tables' rows."""
        self.settle()
        rows = [push for group, _ in steps for push in self._rows.push(group.tables)]
        self._in_flight = [
            (group, group.push(pushed, based_on))
            for (group, based_on), pushed in zip(steps, gradients, strict=True)
        ]
        # The next step must pull the rows after this update.
        if looks_up or not self.overlap:
            self.settle()
        self._rows.await_pushes(rows)

    def settle(self) -> None:
        """Wait until this worker's last step is applied."""
        pushes, self._in_flight = self._in_flight, []
        if pushes:
            (first, *_) = [group.await_push(push) for group, push in pushes]
            self._session.staleness[first] += 1
            self._session.steps += 1
