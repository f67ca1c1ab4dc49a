"""A worker's client of one group: pulls values from servers, pushes gradients.

- `values` are from each server's last answer. Servers may have different versions.
- This client hands out values: it writes them into variables, or passes them to a
  program. If a variable has another value than the last one handed out, the user has
  assigned it.
- A server that restores a snapshot returns to an earlier version, and may later give a
  version number that a worker knows to other values. So the server has a new
  incarnation, and version numbers of different incarnations are never compared.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import jax
import keras
import msgspec
import numpy as np
from jax.sharding import NamedSharding

from replicax._private import keras as internals
from replicax.engine import device_put
from replicax.errors import ClusterMismatchError
from replicax.ps.connection import Connection
from replicax.ps.group_vectors import GroupLayout, VariableSlot
from replicax.ps.limits import Seen
from replicax.ps.messages import (
    Create,
    Pull,
    Push,
    Pushed,
    Replace,
    Vectors,
    Version,
)
from replicax.ps.partition import VariableGroup
from replicax.ps.remote_optimizer import RemoteOptimizer
from replicax.ps.rows import tables_of
from replicax.ps.session import Session, require_none_lost

__all__ = ["GroupPush", "RemoteGroup", "key_of"]

_logger = logging.getLogger("replicax")


GroupPush: TypeAlias = dict[int, Future[tuple[Pushed, Vectors]]]
"""The future answers to a push, by server."""


class RemoteGroup:
    """A worker's client of one group, with a cache of its newest values.

    `placement` says on which `servers` its variables lie. `optimizer` trains the group;
    None: workers add to its values. The optimizer's step count is `steps`, the group's
    updates in this job, plus `steps_ahead`. Each push of the group also updates the
    rows of `tables`. float32 gradients are sent in the dtype `compression`.
    """

    def __init__(
        self,
        session: Session,
        placement: VariableGroup,
        sharding: NamedSharding,
        compression: str | None = None,
        variables: Sequence[keras.Variable] = (),
    ) -> None:
        self.session = session
        session.has_values = True
        self.placement = placement
        self.servers = placement.servers
        self.variables = list(variables)
        self.tables = tables_of(variables)
        self.values: list[jax.Array] = []
        self._steps: dict[int, int] = {}  # By server, from its last answer.
        self.steps_ahead = 0
        self.optimizer: RemoteOptimizer | None = None
        if placement.is_trained:
            self.optimizer = RemoteOptimizer(self, sharding)
        self._handed_out: list[jax.Array] = []
        self._layout = GroupLayout(placement, sharding, compression)
        self._seen: dict[int, Seen] = {}  # By server, from its last answer.
        self._vectors: dict[int, Vectors] = {}  # By server.
        self._sequence = 0

    @property
    def name(self) -> str:
        """The group's name, which is unique in a job."""
        return self.placement.name

    @property
    def versions(self) -> dict[int, int]:
        """The versions of the cached values, by server."""
        return {server: version for server, (_, version) in self._seen.items()}

    @property
    def steps(self) -> int:
        """The number of updates in the newest of the cached values."""
        return max(self._steps.values(), default=0)

    # Creation.

    def create(
        self,
        values: Sequence[jax.Array],
        restored: Mapping[VariableSlot, np.ndarray] | None = None,
    ) -> None:
        """Create the group on the servers; an existing group keeps its values.

        `restored` has the optimizer's variables from a checkpoint. Raises
        `ValuesLostError` if only some servers still have the group's values.
        """
        vectors = self._layout.all_vectors(values)
        message = Create(self.placement)
        answers = self.session.exchange_all(dict.fromkeys(vectors, message), vectors)
        created = {server: answer for server, (answer, _) in answers.items()}
        require_none_lost(self.session.name, self.name, created)
        self.steps_ahead = created[self.servers[0]].iterations
        is_new = not any(answer.version for answer in created.values())
        if self.optimizer is not None and not is_new:
            _logger.warning(
                "%s: the servers already have trained values of %r. Training continues "
                "from them; values that this script has assigned or restored are not "
                "used.",
                self.session.name,
                self.name,
            )
        elif self.optimizer is not None and restored:
            # Before the board lists the group: no other worker pushes yet.
            self.optimizer.restore(restored)
        value = {"digest": self.placement.digest, "steps": self.steps_ahead}
        value = self.session.board("put", key=key_of(self.name), value=value)
        self.steps_ahead = value["steps"]  # Of the first chief, if it was restarted.

    def require_created(self) -> None:
        """Wait until the chief has created the group; raise if the chief's differs."""
        created = self.session.get(key_of(self.name), f"{self.name!r}: initial values")
        if created["digest"] != self.placement.digest:
            raise ClusterMismatchError(
                f"{self.session.name}: {self.name!r} differs from the chief's: "
                f"here it has {len(self.placement.shards)} shards, first "
                f"{self.placement.shards[0]}. All tasks must run the same script with "
                "the same arguments and versions."
            )
        self.steps_ahead = created["steps"]

    # Variables.

    def hand_out(self, stored: dict[int, jax.Array]) -> None:
        """Add the cached values to `stored`, by the ids of their variables."""
        stored |= zip(map(id, self.variables), self.values, strict=True)
        self._handed_out = self.values

    def write(self) -> None:
        """Write the cached values into the variables."""
        internals.write_values(self.variables, self.values)
        self._handed_out = self.values

    def are_unassigned(self, values: Sequence[jax.Array]) -> bool:
        """Whether these are the arrays last handed out, so the user assigned none."""
        return all(map(_is_same, values, self._handed_out))

    def send_assigned(self, values: Sequence[jax.Array]) -> bool:
        """On the chief, send values that the user has assigned; return whether it sent.

        Other workers do not send assigned values; they log a warning.
        """
        if self.are_unassigned(values) or _are_equal(values, self._handed_out):
            return False
        if self.session.is_chief:
            self.assign(values)
            return True
        # No warning for values that the chief has assigned, too.
        if not _are_equal(values, self.values):
            _logger.warning(
                "%s: values were assigned to variables of %s, or another optimizer "
                "trains them; the servers' values are used. Assign on the chief.",
                self.session.name,
                self.name,
            )
        return False

    # Values.

    def pull(self) -> bool:
        """Fetch the values that have changed; return whether there were any."""
        messages = {x: Pull(self.name, self._seen.get(x)) for x in self.servers}
        return self._cache(self.session.exchange_all(messages))

    def assign(self, values: Sequence[jax.Array]) -> None:
        """Replace the servers' values."""
        vectors = self._layout.all_vectors(values)
        message = Replace(self.name)
        self.session.exchange_all(dict.fromkeys(vectors, message), vectors)
        self.pull()

    def push(
        self, gradients: Sequence[jax.Array], based_on: Mapping[int, int]
    ) -> GroupPush:
        """Start a push; `await_push` waits for its answers, which have new values.

        `gradients` are equal on all of this worker's replicas. They were computed from
        values of the versions `based_on`, by server.
        """
        pushed = self._layout.as_pushed(gradients)
        self._sequence += 1
        message = Push(
            self.name,
            self.session.name,
            self.session.id,
            self._sequence,
            0,
            self.session.closure_push(self.name),
        )
        seen = dict(self._seen)

        def exchange(server: int, connection: Connection) -> tuple[Pushed, Vectors]:
            own = msgspec.structs.replace(
                message, based_on=based_on[server], seen=seen[server]
            )
            # `vectors` waits for the step's gradients, in the connection's thread.
            return connection.exchange(own, self._layout.vectors(pushed, server))

        connections = self.session.connections
        return {
            server: connections[server].submit(functools.partial(exchange, server))
            for server in self.servers
        }

    def await_push(self, push: GroupPush) -> int:
        """Wait for a push, cache the values of its answers, and return its staleness.

        Servers may count different numbers of updates; the largest is returned.
        """
        answers = self.session.results(push)
        self._cache(answers)
        return max(answer.staleness for answer, _ in answers.values())

    def _cache(self, answers: Mapping[int, tuple[Version, Vectors]]) -> bool:
        """Cache the values in servers' answers; return whether there were any."""
        changed = False
        for server, (answer, vectors) in answers.items():
            self._seen[server] = answer.seen
            self._steps[server] = answer.steps
            if vectors:
                self._vectors[server] = vectors
                changed = True
        if changed or not self.values:
            self.values = self._layout.on_devices(self._vectors)
        return changed


def key_of(name: str) -> str:
    """The board's key under which the chief publishes a group it has created."""
    return f"group {name}"


def _are_equal(values: Sequence[jax.Array], others: Sequence[jax.Array]) -> bool:
    pairs = zip(values, others, strict=True)
    return all(np.array_equal(*map(device_put.local_value, pair)) for pair in pairs)


def _is_same(a: jax.Array, b: jax.Array) -> bool:
    """Whether two arrays are the same object, or share their memory."""
    if a is b:
        return True
    if not isinstance(a, jax.Array) or a.is_deleted() or b.is_deleted():
        return False
    return (
        a.addressable_data(0).unsafe_buffer_pointer()
        == b.addressable_data(0).unsafe_buffer_pointer()
    )
