"""A worker's training steps on servers: begins, pushes and settles each.

- Between steps at most one push is in flight, the last step's. `settle` waits for it;
  who needs its values, or counts steps, calls that first.
- A synchronous step has the number of the steps before it, in each of its groups. Each
  part of it is applied once, whoever brings it.
- A server keeps the values of a step's begin until the next step is over. So a part
  whose worker died between two of its pushes is computed again, from the same values.
- With backup workers a worker may go on before its step is over. It waits for the end
  where its next step begins.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax

from replicax._util.waiting import wait_for
from replicax.ps.group_servers import GroupPush
from replicax.ps.groups import NEXT_STEP, StepShare
from replicax.ps.remote import RemoteGroup
from replicax.ps.rows import RemoteTables, RowPush
from replicax.ps.session import Session

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = ["TrainingStep", "TrainingSteps"]

_SOON_SECONDS = 1.0
_logger = logging.getLogger("replicax")


class _GroupStep(NamedTuple):
    """A group in a step: its share of a synchronous one, the versions of the begin."""

    group: RemoteGroup
    share: StepShare | None
    based_on: dict[int, int]


class TrainingStep(NamedTuple):
    """A training step of this worker, as the servers are told of it.

    If it is not `is_due`, others have brought this part, and the step is made by now.
    """

    groups: list[_GroupStep]
    is_due: bool

    @property
    def begins_of_tables(self) -> dict[str, tuple[str, int]]:
        """By table, the group and its synchronous step with which rows are updated."""
        return {
            table: (group.name, share.step)
            for group, share, _ in self.groups
            if share is not None
            for table in group.tables
        }


class TrainingSteps:
    """The training steps of this worker, one after another.

    A synchronous step has `num_parts` shares, an asynchronous one 1. `first` has by
    group the number of the epoch's first step.
    """

    def __init__(
        self,
        strategy: "ParameterServerStrategy",
        session: Session,
        rows: RemoteTables,
        num_parts: int,
    ) -> None:
        self.num_parts = num_parts
        self.first: dict[str, int] = {}
        self._strategy = strategy
        self._session = session
        self._rows = rows
        self._shares: deque[StepShare] = deque()
        self._in_flight: list[tuple[RemoteGroup, GroupPush]] = []
        self._has_stepped = False  # In a loop of the script's own.

    def expect(self, part: int, num_rows: int, step: int = NEXT_STEP) -> None:
        """Set the share of a synchronous step that the next training program computes.

        The part has `num_rows` examples; `step` counts from the epoch's start.
        """
        self._shares.append(self._share(part, step, float(num_rows)))

    def _share(self, part: int, step: int, weight: float | None) -> StepShare:
        return StepShare(step=step, part=part, num_parts=self.num_parts, weight=weight)

    def next_share(self) -> StepShare | None:
        """Take the share that the program computes; None: steps are asynchronous."""
        if not self._strategy.sync:
            return None
        if self._shares:
            return self._shares.popleft()
        if self._strategy.backup_workers:
            raise NotImplementedError(
                "ParameterServerStrategy: backup_workers serve `fit` only; in a custom "
                "loop nobody knows which worker computes which rows. Leave "
                "backup_workers at 0."
            )
        return self._share(self._session.index, NEXT_STEP, None)

    # The begin of a step.

    def begin(
        self,
        groups: Sequence[RemoteGroup],
        share: StepShare | None,
        stored: dict[int, jax.Array],
    ) -> TrainingStep:
        """Begin a step: add the values that it is computed from to `stored`.

        A worker whose last part others had brought already has not seen that step's
        end, and waits for it here.
        """
        if share is None:
            begun = [_GroupStep(group, None, dict(group.versions)) for group in groups]
            return TrainingStep(begun, is_due=True)
        shares = [(group, self._share_of(group, share)) for group in groups]
        for group, own in shares:
            self._await_begin(group, own.step)
        is_due = not self._has_ended(shares)
        for group, own in shares:
            if is_due:
                group.pull_begin(own.step)
            group.hand_out(stored)
        begun = [_GroupStep(group, own, dict(group.versions)) for group, own in shares]
        return TrainingStep(begun, is_due)

    def _share_of(self, group: RemoteGroup, share: StepShare) -> StepShare:
        step = group.steps
        if share.step == NEXT_STEP:
            self._warn_of_restart(step)
        else:
            step = self.first.get(group.name, 0) + share.step
        weight = group.weight_of(share.weight)
        return dataclasses.replace(share, step=step, weight=weight)

    def _warn_of_restart(self, step: int) -> None:
        """Once, in a loop of the script's own: its batches are not those of the others.

        `fit` says which step is due; such a loop begins anew.
        """
        if self._has_stepped:
            return
        self._has_stepped = True
        if self._session.starts > 1 and step:
            _logger.warning(
                "%s was started again, and its loop begins in step %d of the others. "
                "With sync=True the loop must begin with the batch that is due there, "
                "as from a checkpoint with the position in the data; model.fit does so "
                "by itself.",
                self._session.name,
                step,
            )

    def _await_begin(self, group: RemoteGroup, step: int) -> None:
        """Wait for the values of a step's begin."""

        def has_begun() -> bool | None:
            if group.has_begun(step):
                return True
            group.pull()
            return None

        what = f"step {step} of {group.name!r}"
        self._session.wait(has_begun, what, self._session.absent)

    def _has_ended(self, shares: Sequence[tuple[RemoteGroup, StepShare]]) -> bool:
        """Whether a step is over in all groups, so that no part of it is due.

        Over on one server only, it soon is on all, where they have all parts. They do
        not if a worker has died between two of its pushes: then its part is due.
        """

        def poll() -> bool | None:
            if all(group.has_ended(share.step) for group, share in shares):
                return True
            if not any(group.is_ahead_of(share.step) for group, share in shares):
                return False
            for group, _ in shares:
                group.pull()
            return None

        return wait_for(poll, _SOON_SECONDS, late=lambda: False)

    # Its end.

    def push(
        self,
        step: TrainingStep,
        gradients: Sequence[Sequence[jax.Array]],
        *,
        looks_up: bool,
    ) -> bool:
        """Push each group's gradients; whether the step counts, as far as is known."""
        if not step.is_due:
            self._session.steps += 1
            return False
        self.settle()
        may_leave = self._strategy.backup_workers > 0
        rows: list[RowPush] = []
        for group, share, _ in step.groups:
            if group.tables:
                rows += self._rows.push(
                    group.name, group.tables, share, may_leave=may_leave
                )
        if self._strategy.sync and rows:  # When a step is over, so are its rows.
            self._rows.finish(rows)
        self._in_flight = [
            (group, group.push(given, based_on, share, may_leave=may_leave))
            for (group, share, based_on), given in zip(
                step.groups, gradients, strict=True
            )
        ]
        # The next step looks up rows that this one changes.
        counts = (self._strategy.overlap and not looks_up) or self.settle()
        if not self._strategy.sync and rows:
            self._rows.finish(rows)
        return counts

    def settle(self) -> bool:
        """Wait until this worker's last step is applied; whether the step counts."""
        pushes, self._in_flight = self._in_flight, []
        if not pushes:
            return True
        (group, push), *others = pushes
        # Groups may have got a part from different workers; the first one decides.
        result = group.finish(push)
        for group, push in others:
            group.finish(push, stays=result.counts)
        if result.counts:
            self._session.staleness[result.staleness] += 1
        self._session.steps += 1
        return result.counts
