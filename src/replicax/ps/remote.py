"""A worker's client of one group: pulls values from servers, pushes gradients."""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax
import keras
import msgspec
import numpy as np
from jax.sharding import NamedSharding

from replicax._private import keras as internals
from replicax._util.types import JSONObject, PyTree
from replicax.engine import device_put
from replicax.errors import CheckpointError, ClusterError, ClusterMismatchError
from replicax.ps.assignments import OptimizerNumber, Stored, are_equal, are_same
from replicax.ps.connection import Connection, ServerRefused
from replicax.ps.group_vectors import (
    GroupLayout,
    VariableSlot,
    cut_slots,
    join_slots,
    slots_from_message,
    slots_to_message,
)
from replicax.ps.groups import StepShare
from replicax.ps.messages import Commit, Create, GetSlots, Pull, Push, Replace, SetSlots
from replicax.ps.partition import VariableGroup
from replicax.ps.rows import tables_of
from replicax.ps.session import Session

__all__ = ["SUMMED", "PushResult", "RemoteGroup", "ServerPushes", "key_of"]

_SLACK_SECONDS = 10.0
"""For the server to say first that other workers' shares did not come in time."""
SUMMED: JSONObject = {"kind": "add", "of": "sums"}
"""The rule of variables to which a synchronous step adds its shares' sum."""
_logger = logging.getLogger("replicax")
_Vectors = dict[str, PyTree]
_Answer = tuple[JSONObject, _Vectors]


class PushResult(NamedTuple):
    """The result of a push.

    `counts`: it is in the values; a synchronous part that another worker had brought
    already is not. `staleness`: most updates that any server applied between the pull
    and this push.
    """

    counts: bool
    staleness: int


class ServerPushes(NamedTuple):
    """The pushes of one step to all servers; `sends` repeat them."""

    futures: list[Future[_Answer]]
    sends: list[Callable[[Connection], _Answer]]
    share: StepShare | None
    may_leave: bool


class RemoteGroup:
    """A worker's client of one group, with a cache of its newest values.

    `values` are the newest known here, `versions` theirs by server; `num_assigned`
    versions were assigned, as the chief counts. A value that was handed out, and is no
    longer in its variable, was assigned by the user. `tables` are those whose rows are
    updated with it. float32 gradients travel in the dtype `compression`.
    """

    def __init__(
        self,
        session: Session,
        group: VariableGroup,
        sharding: NamedSharding,
        compression: str | None = None,
        variables: Sequence[keras.Variable] = (),
    ) -> None:
        self.group = group
        self.variables = list(variables)
        self.tables = tables_of(variables)
        self.values: list[jax.Array] = []
        self.versions: dict[int, int] = {}
        self.num_assigned = 0
        self.num_replaced = 0  # Assignments of values, by this process.
        self._first_count = 0  # Steps that were made before the servers had the group.
        self._steps: OptimizerNumber | None = None
        self._rate: OptimizerNumber | None = None
        self._handed: list[jax.Array] = []
        self._session = session
        self._sharding = sharding
        self._servers = group.servers
        self._layout = GroupLayout(group, sharding, compression)
        self._incarnations: dict[int, str] = {}  # Of the servers, with `versions`.
        self._behind: dict[int, int] = {}  # Version before a server went back, by it.
        self._held: dict[int, _Vectors] = {}
        self._sequence = 0

    @property
    def name(self) -> str:
        """The group's name, which is unique in a job."""
        return self.group.name

    @property
    def trains(self) -> bool:
        """Whether an optimizer makes the updates; else workers add what changed."""
        return self.group.rule["kind"] == "optimizer"

    def weight_of(self, given: float | None) -> float | None:
        """The weight of a share whose gradients have a given one; None: it is summed.

        Moving statistics are averaged also where gradients are summed.
        """
        if self.group.rule == SUMMED:
            return None
        if given is not None or self.trains:
            return given
        is_float = all("float" in part.dtype for part in self.group.parts)
        return 1.0 if is_float else None

    @property
    def version(self) -> int:
        """The newest of `versions`: the number of updates and assignments."""
        return max(self.versions.values())

    # The beginning.

    def create(
        self,
        values: Sequence[jax.Array],
        restored: Mapping[VariableSlot, np.ndarray] | None = None,
    ) -> None:
        """Create the group on the servers; a server keeps values that it has.

        `restored` are the optimizer's variables from a checkpoint.
        """
        made = self._ask_all(Create(self.group), self._layout.all_vectors(values))
        self._first_count = made[0][0]["iterations"]
        # Before others hear of the group, and push.
        if restored and not any(header["version"] for header, _ in made):
            self.restore(restored)
            steps = restored.get(("iteration", None), self._first_count)
            self._first_count = int(steps)
        created = {"digest": self.group.digest, "iterations": self._first_count}
        self._session.board("put", key=key_of(self.name), value=created)

    def require_created(self) -> None:
        """Wait until the chief has created the group; raise if it differs."""
        created = self._session.get(key_of(self.name), f"{self.name!r}: initial values")
        if created["digest"] != self.group.digest:
            raise ClusterMismatchError(
                f"{self._session.name}: {self.name!r} differs from the chief's: "
                f"here it is of {len(self.group.parts)} parts, first "
                f"{self.group.parts[0]}. All tasks must run the same script with the "
                "same arguments and versions."
            )
        self._first_count = created["iterations"]

    # Variables.

    def hand_out(self, stored: dict[int, jax.Array]) -> None:
        """Add the cached values to `stored`, by ids of variables."""
        stored |= zip(map(id, self.variables), self.values, strict=True)
        self._handed = self.values

    def write(self) -> None:
        """Write the cached values into the variables."""
        internals.write_values(self.variables, self.values)
        self._handed = self.values

    def is_handed(self, given: Sequence[jax.Array]) -> bool:
        """Whether these are the very arrays of the last `hand_out` or `write`."""
        return are_same(given, self._handed)

    def is_assigned(self, given: Sequence[jax.Array]) -> bool:
        """Whether the user has assigned to variables since `hand_out` or `write`."""
        return not self.is_handed(given) and not are_equal(given, self._handed)

    def follow(self, given: Sequence[jax.Array]) -> None:
        """On the chief: send values that the user has assigned to the servers."""
        if not self.is_assigned(given):
            return
        if self._session.is_chief:
            self.assign(given)
        elif not are_equal(given, self.values):  # Else the chief has as well.
            _logger.warning(
                "%s: values were assigned to variables of %s, or another optimizer "
                "trains them; those of the servers are used. Assign on the chief.",
                self._session.name,
                self.name,
            )

    def train(self, count: keras.Variable | None, rate: keras.Variable | None) -> None:
        """Follow an optimizer: its number of steps, and its rate where a variable."""
        if self._steps is None and count is not None:
            self._steps = OptimizerNumber(count)
            self._rate = None if rate is None else OptimizerNumber(rate)

    @property
    def count(self) -> keras.Variable | None:
        """The optimizer's number of steps; None: this group follows none."""
        return None if self._steps is None else self._steps.variable

    def assigned_rate(self, stored: Stored | None = None) -> float | None:
        """The learning rate if it has changed since the last call, else None."""
        return None if self._rate is None else self._rate.assigned(stored)

    def assigned_steps(self, stored: Stored | None = None) -> float | None:
        """The number of steps if the user has assigned another, else None."""
        return None if self._steps is None else self._steps.assigned(stored)

    def num_steps(self) -> jax.Array:
        """The optimizer's number of steps, as the next value of its variable."""
        assert self._steps is not None
        made = self.version - self.num_assigned + self._first_count
        array = device_put.laid_out(self._steps.cast(made), self._sharding)
        self._steps.note(array, made)
        return array

    def _count_from(self, steps: int) -> None:
        """Take the servers' values for those after a number of steps."""
        self.num_assigned = self.version - (steps - self._first_count)

    # Values.

    def pull(self) -> bool:
        """Fetch values of newer versions; whether there were any."""
        pulls = [
            self._submit(server, functools.partial(self._pull_from, server))
            for server in self._servers
        ]
        return self._take([self._session.result(pull) for pull in pulls])

    def has_begun(self, step: int) -> bool:
        """Whether the cached values are at least those of a synchronous step's begin.

        A restarted server may have none of these; the step's gradients bring it there.
        """
        return all(
            version >= step or server in self._behind
            for server, version in self.versions.items()
        )

    def has_ended(self, step: int) -> bool:
        """Whether all servers have applied a synchronous step."""
        return min(self.versions.values()) > step

    def is_ahead_of(self, step: int) -> bool:
        """Whether any server has applied a synchronous step."""
        return max(self.versions.values()) > step

    def pull_begin(self, step: int) -> None:
        """Cache the values from which a synchronous step is computed.

        Servers that have applied it are asked again. One that was restarted since does
        not have them any more: its newest values stand, which is logged.
        """
        ahead = [i for i, x in enumerate(self._servers) if self.versions[x] > step]
        asked = [self._ask(i, Pull(self.name, begin_of=step)) for i in ahead]
        for i, future in zip(ahead, asked, strict=True):
            _, vectors = self._session.result(future)
            server = self._servers[i]
            if vectors:
                self._held[server], self.versions[server] = vectors, step
                continue
            _logger.warning(
                "%s: ps:%d has no values of the begin of step %d of %s, which is not "
                "over on all servers: a part of it is computed from newer ones.",
                self._session.name,
                server,
                step,
                self.name,
            )
        if ahead:
            self.values = self._layout.on_devices(self._held)

    def assign_rate(self, rate: float) -> None:
        """Set the learning rate of the servers' optimizers."""
        assert self._rate is not None
        self.assign_slots({("learning_rate", None): self._rate.cast(rate)})

    def assign_steps(self, steps: float) -> None:
        """Set the number of steps of the servers' optimizers."""
        assert self._steps is not None
        self.assign_slots({("iteration", None): self._steps.cast(steps)})
        self._count_from(int(steps))

    def slots(self, name: str | None = None) -> dict[VariableSlot, np.ndarray]:
        """Read slots of the optimizer, those of a name or all; slices are joined."""
        answers = self._ask_all(GetSlots(self.name, name))
        on_servers = {
            server: slots_from_message(header["slots"], vectors)
            for server, (header, vectors) in zip(self._servers, answers, strict=True)
        }
        return join_slots(self.group, on_servers)

    def assign_slots(self, values: Mapping[VariableSlot, np.ndarray]) -> None:
        """Set slots of the servers' optimizers."""
        cut = [cut_slots(self.group, values, server) for server in self._servers]
        headers, vectors = zip(*map(slots_to_message, cut), strict=True)
        self._ask_all([SetSlots(self.name, x) for x in headers], vectors)

    def restore(self, values: Mapping[VariableSlot, np.ndarray]) -> None:
        """Restore all slots of the servers' optimizers from a checkpoint."""
        try:
            self.assign_slots(values)
        except ServerRefused as refused:
            raise CheckpointError(
                f"Checkpoint.restore: what was saved of the optimizer does not fit the "
                f"one of {self.name!r}: {refused} Compile the model with the optimizer "
                "that was saved."
            ) from refused
        steps = values.get(("iteration", None))
        if self.versions and steps is not None:
            self._count_from(int(steps))

    def assign(self, values: Sequence[jax.Array]) -> None:
        """Replace the servers' values."""
        self._ask_all(Replace(self.name), self._layout.all_vectors(values))
        self.num_assigned += 1
        self.num_replaced += 1
        self.pull()

    def averages(self) -> list[jax.Array]:
        """The servers' moving averages of the values, if the optimizer has them."""
        averages = self.slots("average")
        return [
            device_put.laid_out(averages["average", i], self._sharding)
            for i in range(len(self.variables))
            if averages
        ]

    def push(
        self,
        gradients: Sequence[jax.Array],
        based_on: Mapping[int, int],
        share: StepShare | None = None,
        *,
        may_leave: bool = False,
    ) -> ServerPushes:
        """Start a push, which is answered with new values; `finish` waits for it.

        Gradients are equal on all of this worker's replicas, and of the `based_on`
        versions. Without a `share` of a synchronous step they are applied at once; with
        one the worker `may_leave` it to others to end the step.
        """
        given = self._layout.as_pushed(gradients)
        self._sequence += 1
        sends = []
        for server in self._servers:
            message = Push(
                self.name,
                self._session.name,
                self._session.id,
                self._sequence,
                based_on[server],
                self._session.timeouts.step,
                share,
                may_leave,
            )
            send = functools.partial(self._push_to, server, message, given)
            sends.append(send)
        futures = list(map(self._submit, self._servers, sends))
        return ServerPushes(futures, sends, share, may_leave)

    def finish(self, push: ServerPushes, *, stays: bool | None = None) -> PushResult:
        """Wait for a push, and cache the values of its answer.

        A synchronous step is over then, unless this worker may leave and `stays` is
        not: parts of workers that died may be waiting for it. None: it leaves if
        another worker had brought its part. Servers may have got that from different
        workers, one of which must leave; the first server decides.
        """
        answers = [self._session.result(future) for future in push.futures]
        if stays is None:
            stays = answers[0][0]["applied"]
        if push.share is not None and (stays or not push.may_leave):
            self._await_end(push, push.share.step, answers)
        self._take(answers)
        return PushResult(
            counts=answers[0][0]["applied"],
            staleness=max(header["staleness"] for header, _ in answers),
        )

    def _await_end(self, push: ServerPushes, step: int, answers: list[_Answer]) -> None:
        """Poll until a synchronous step is applied; `answers` get the last replies.

        Servers need a second round for a step that is clipped by its norm: a commit,
        of whichever worker has the norms of all. Where the step is over on some server,
        who ended it may have died before the other servers heard of it.
        """

        def poll() -> bool | None:
            norms = [said["squared_norms"] for said, _ in answers]
            commit: Commit | None = None
            if None not in norms:  # Else parts are missing: of a restarted server, too.
                total: Counter[str] = Counter()
                for each in norms:
                    total.update(each)
                commit = Commit(self.name, step, dict(total))
            for i, future in [
                (i, self._ask(i, commit or Pull(self.name, v["version"], step)))
                for i, (v, _) in enumerate(answers)
                if not v["is_over"]
            ]:
                answers[i] = self._end_of(push, i, future, answers[i])
            return all(said["is_over"] for said, _ in answers) or None

        self._session.wait(
            poll, f"the end of step {step} of {self.name!r}", self._session.absent
        )

    def _end_of(
        self, push: ServerPushes, i: int, asked: Future[_Answer], before: _Answer
    ) -> _Answer:
        """Ask the `i`-th server for the progress of a step."""
        try:
            newer, vectors = self._session.result(asked)
        except ServerRefused as refused:
            if refused.kind != "IncompleteStep":
                raise
            # It was restarted before the commit, and has forgotten the parts.
            again = self._submit(self._servers[i], push.sends[i])
            newer, vectors = self._session.result(again)
        return before[0] | newer, vectors or before[1]

    def _take(self, answers: Sequence[_Answer]) -> bool:
        """Cache the values in servers' answers; whether there were any."""
        changed = False
        for server, (header, vectors) in zip(self._servers, answers, strict=True):
            before = self.versions.get(server, 0)
            if header["version"] < before:
                self._behind[server] = before
            self._note_restart(server)
            self.versions[server] = header["version"]
            if header["version"] >= self._behind.get(server, 0):
                self._behind.pop(server, None)
            if vectors:
                self._held[server] = vectors
                changed = True
        if changed or not self.values:
            self.values = self._layout.on_devices(self._held)
        return changed

    def _note_restart(self, server: int) -> None:
        now = self._session.incarnations[server]
        if self._incarnations.setdefault(server, now) != now:
            self._incarnations[server] = now
            _logger.warning(
                "ps:%d was restarted from a snapshot; its log says how many updates "
                "of %s are lost.",
                server,
                self.name,
            )

    # Messages. Those to one server are sent one after another, by its thread.

    def _submit(
        self, server: int, use: Callable[[Connection], _Answer]
    ) -> Future[_Answer]:
        return self._session.connections[server].submit(use)

    def _ask(
        self, i: int, message: msgspec.Struct, vectors: _Vectors | None = None
    ) -> Future[_Answer]:
        """Exchange a message with the `i`-th of the servers."""
        return self._submit(self._servers[i], lambda x: x.exchange(message, vectors))

    def _ask_all(
        self,
        message: msgspec.Struct | Sequence[msgspec.Struct],
        vectors: Sequence[_Vectors | None] | None = None,
    ) -> list[_Answer]:
        """Exchange a message with each server, or each its own, and wait."""
        num = len(self._servers)
        own = message if isinstance(message, Sequence) else [message] * num
        asked = map(self._ask, range(num), own, vectors or [None] * num)
        return [self._session.result(future) for future in list(asked)]

    def _pull_from(self, server: int, connection: Connection) -> _Answer:
        began = time.perf_counter()
        answer = connection.exchange(Pull(self.name, self.versions.get(server)))
        self._session.exchange_s[server] += time.perf_counter() - began
        known = self._incarnations.get(server)
        if not answer[1] and known not in (None, self._session.incarnations[server]):
            # Restored: what this worker has is of no version there.
            answer = connection.exchange(Pull(self.name))
        return answer

    def _push_to(
        self,
        server: int,
        message: Push,
        gradients: Sequence[jax.Array],
        connection: Connection,
    ) -> _Answer:
        # Here the thread waits for the step to be computed.
        vectors = self._layout.vectors(gradients, server)
        step = self._session.timeouts.step
        began = time.perf_counter()
        try:
            # The server says first when other workers' parts do not come in time.
            answer = connection.exchange(
                message, vectors, reply_timeout_seconds=step + _SLACK_SECONDS
            )
        except ServerRefused as refused:
            if refused.kind != "SyncTimeout":
                raise
            raise ClusterError(
                f"{self._session.name}: {self._session.absent()} did not bring a part "
                f"of step {message.share and message.share.step} "
                f"within {step:.0f} s. See what it "
                "prints, or give it more time (rx.Timeouts(step=...))."
            ) from refused
        self._session.exchange_s[server] += time.perf_counter() - began
        return answer


def key_of(name: str) -> str:
    """The board's key of the digest of a group that the chief has created."""
    return f"group {name}"
