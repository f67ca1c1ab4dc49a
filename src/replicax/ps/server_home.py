"""The home of variables on servers: runs programs on copies of the servers' values.

- A variable has its last value from the servers, or a later value that the user
  assigned. The next program, epoch or `publish` detects assigned values, and the chief
  sends them to the servers.
- A dict `stored` maps ids of variables to their values while a program runs. The
  values are written together when the program has ended, so an error changes no
  variable.
- In `fit`, new values come with the answers to pushes and at the end of an epoch;
  `evaluate` within `fit` pulls no values.
- The runner calls `execute` under its lock; XLA's threads use `rows`, which has its
  own lock.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util.types import PyTree
from replicax.engine.program import Program, StepResult
from replicax.engine.variables import Variable, is_seed_state
from replicax.errors import ClusterError
from replicax.keras.session import FitSession
from replicax.ps.fit import WorkQueueFit
from replicax.ps.group_vectors import VariableSlot
from replicax.ps.optimizers import clip_before_push
from replicax.ps.partition import Partitioner
from replicax.ps.remote import GroupPush, RemoteGroup
from replicax.ps.remote_optimizer import Stored
from replicax.ps.rows import RemoteTables, tables_of
from replicax.ps.session import Session
from replicax.ps.variables import RemoteVariables
from replicax.strategies.home import ReplicaHome

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = ["ServerHome"]


class _Connected(NamedTuple):
    """The groups of a program's variables on servers.

    `groups` has the group of each update, followed by `moving`, the groups of moving
    statistics. `others` are the variables of `moving` that the program does not write.
    With `looks_up` the program looks up rows of tables.
    """

    groups: list[RemoteGroup]
    moving: list[RemoteGroup]
    others: list[keras.Variable]
    looks_up: bool


class ServerHome(ReplicaHome):
    """Variables live on servers, which apply the updates; devices have copies.

    `remote` has this worker's variables on servers, `rows` its tables. With `overlap` a
    push is still in flight when the next step begins. `fit_metrics` has the ids of the
    running `fit`'s metric variables; None outside of `fit`. `in_closure` is
    true while a closure of a coordinator runs.
    """

    keeps_slots = False

    def __init__(
        self,
        strategy: "ParameterServerStrategy",
        session: Session,
        partitioner: Partitioner | None,
    ) -> None:
        super().__init__(strategy.group)
        self.session = session
        self.rows = RemoteTables(session, compression=strategy.compression)
        self.remote = RemoteVariables(
            session,
            strategy.group.mirrored,
            partitioner=partitioner,
            compression=strategy.compression,
            rows=self.rows,
        )
        self.overlap = strategy.overlap
        self._in_flight: list[tuple[RemoteGroup, GroupPush]] = []
        self.fit_metrics: frozenset[int] | None = None
        self.in_closure = False
        self._strategy = strategy
        self._num_fits = 0

    def refresh(self) -> None:
        """Pull the newest values; write them unless the user has assigned others."""
        self.settle()
        requests = self.remote.requests
        if requests is not None:
            requests.adopt()
        # Under a coordinator every task's script assigns values; the chief's are used.
        is_follower = requests is not None and not self.session.is_chief
        for group in self.remote.groups:
            self._send_optimizer_numbers(group)
            group.pull()
            values = internals.read_values(group.variables)
            if _have_values(group) and (is_follower or group.are_unassigned(values)):
                group.write()
            if group.optimizer is not None:
                group.optimizer.write_steps()

    def refresh_values(self) -> None:
        """Pull the newest values for the next step, without writing variables."""
        self.settle()
        for group in self.remote.groups:
            group.pull()

    def num_steps(self) -> dict[str, list[int]]:
        """By group: its steps in this job, and its optimizer's `steps_ahead`."""
        return {x.name: [x.steps, x.steps_ahead] for x in self.remote.groups}

    def begin_epoch(self, num_steps: Mapping[str, Sequence[int]]) -> None:
        """Begin an epoch with the chief's `num_steps()`."""
        for group in self.remote.groups:
            own = group.steps, group.steps_ahead
            steps, group.steps_ahead = num_steps.get(group.name, own)
            is_ahead = group.steps > steps and _have_values(group)
            if is_ahead and not self.session.is_chief:
                # This script assigned the same values as the chief, and other workers
                # have trained them since: overwrite them, without a warning.
                group.write()

    def execute(self, program: Program, arrays: Sequence[ArrayLike]) -> PyTree:
        """Run a program on the newest values, and push its gradients."""
        stored = _values(program.variables)
        connected = self._connect(program, stored)
        based_on = [group.versions for group in connected.groups]
        before = {id(v): stored[id(v)] for v in (*program.written, *connected.others)}

        # No input is donated, and results are written only at the end. So the program
        # can run again after a server with rows was lost, and an error changes no
        # variable.
        def run() -> StepResult:
            return program([stored[id(v)] for v in program.inputs], arrays)

        result = self.rows.run_program(run) if connected.looks_up else run()
        stored |= zip(map(id, program.written), result.written, strict=True)
        if connected.groups:
            deltas = [
                [_difference(stored[id(v)], before[id(v)]) for v in group.variables]
                for group in connected.moving
            ]
            self._push(connected, [*result.gradients, *deltas], based_on)
            for group in connected.groups:
                group.hand_out(stored)
                if group.optimizer is not None:
                    group.optimizer.store_steps(stored)
        changed = [*program.changed, *connected.others]
        internals.write_values(changed, [stored[id(v)] for v in changed])
        return result.results

    def _push(
        self,
        connected: _Connected,
        gradients: Sequence[Sequence[jax.Array]],
        based_on: Sequence[Mapping[int, int]],
    ) -> None:
        """Push each group's gradients, and the gradients of its tables' rows.

        With `overlap` the push stays in flight when the next step begins.
        """
        self.settle()
        groups = connected.groups
        rows = [push for group in groups for push in self.rows.push(group.tables)]
        self._in_flight = [
            (group, group.push(pushed, versions))
            for group, pushed, versions in zip(groups, gradients, based_on, strict=True)
        ]
        # The next step must pull the rows after this update.
        if connected.looks_up or not self.overlap:
            self.settle()
        self.rows.await_pushes(rows)

    def adopt(self, program: Program) -> None:
        """Write the servers' values into a program's variables, without a step."""
        stored = _values(program.variables)
        connected = self._connect(program, stored)
        internals.write_values(
            program.variables, [stored[id(v)] for v in program.variables]
        )
        for group in connected.groups:
            if group.optimizer is not None:
                group.optimizer.write_steps()

    def _connect(self, program: Program, stored: dict[int, jax.Array]) -> _Connected:
        """Return a program's groups, and update `stored` from their cached values.

        Sends values and learning rates that the user has assigned.
        """
        connected = program.at_home
        if connected is None:
            connected = program.at_home = self._connect_new(program, stored)
        stored |= _values(connected.others)
        for group in connected.groups:
            self._send_optimizer_numbers(group, stored)
            group.send_assigned([stored[id(v)] for v in group.variables])
            group.hand_out(stored)
        return connected

    def _connect_new(
        self, program: Program, stored: dict[int, jax.Array]
    ) -> _Connected:
        looks_up = bool(tables_of(program.inputs))
        updates = program.deferred_updates
        if not updates:  # The program does not train.
            return _Connected([], [], [], looks_up)
        # Moving statistics and counters, to which all workers add.
        state = [v for v in program.written if self._is_added_to(v, program)]
        groups = self.remote.connect(updates, state, stored)
        moving, written = groups[len(updates) :], set(map(id, program.written))
        others = [v for x in moving for v in x.variables if id(v) not in written]
        return _Connected(groups, moving, others, looks_up)

    def _is_added_to(self, variable: Variable, program: Program) -> bool:
        """Whether all workers add their changes of a variable on the servers.

        True for moving statistics. Also true for counters in `fit`, because each worker
        computes only some of its steps. False for a variable that a step overwrites
        without reading its old value: each worker keeps its own last value.
        """
        if is_seed_state(variable):
            return False
        if variable.aggregation == "mean":
            return True
        if self.fit_metrics is None:
            return False
        trained = {id(v) for update in program.deferred_updates for v in update.changed}
        is_number = jnp.issubdtype(variable.dtype, jnp.floating) or jnp.issubdtype(
            variable.dtype, jnp.signedinteger
        )
        return is_number and id(variable) not in (
            program.overwritten | trained | self.fit_metrics
        )

    def publish(self) -> None:
        """On the chief: send values and learning rates that the user has assigned."""
        for group in self.remote.groups if self.session.is_chief else ():
            self._send_optimizer_numbers(group)
            if _have_values(group) and group.send_assigned(
                internals.read_values(group.variables)
            ):
                group.write()

    def _send_optimizer_numbers(
        self, group: RemoteGroup, stored: Stored | None = None
    ) -> None:
        """On the chief: send an optimizer's numbers that the user has assigned."""
        if group.optimizer is not None:
            rate = group.optimizer.send_assigned(stored)
            if rate is not None:
                self.rows.assign_rate(group.name, group.tables, rate)

    def finalize(self, optimizer: keras.optimizers.Optimizer) -> None:
        """At the end of training, overwrite values with the optimizer's averages."""
        # Keras also calls this after an error; then the servers may be lost.
        if isinstance(sys.exc_info()[1], ClusterError):
            return
        self.settle()
        remote = self.remote.on_servers(optimizer)
        if remote is not None and (averages := remote.averages()):
            internals.write_values(remote.group.variables, averages)

    def prepared_gradients(
        self, optimizer: keras.Optimizer, grads: list[jax.Array | None]
    ) -> list[jax.Array | None]:
        """Clip gradients here, because a server has only some of the variables."""
        return clip_before_push(optimizer, grads)

    def adds_up(self, *, trains: bool) -> bool:
        """Whether workers' metrics are summed at an epoch's end or after a closure."""
        in_fit = self.fit_metrics is not None
        is_shared = self.in_closure or (in_fit and trains)
        return is_shared and len(self.session.workers) > 1

    def claimed_steps(self, model: keras.Model, fit: object) -> WorkQueueFit:
        """The work queue by which `fit` shares an epoch's steps with other workers."""
        assert isinstance(fit, FitSession)
        self._num_fits += 1
        return WorkQueueFit(self._strategy, model, fit, self._num_fits)

    def read_state(self, optimizer: keras.Optimizer) -> dict[str, np.ndarray]:
        """Read an optimizer's slots from the servers, by their names in a checkpoint.

        The names are the same as without servers, so the checkpoints are
        interchangeable.
        """
        self.settle()
        return {
            name if variable is None else f"{name}/{variable}": array
            for (name, variable), array in self.remote.slots(optimizer).items()
        }

    def write_state(
        self, optimizer: keras.Optimizer, arrays: dict[str, np.ndarray]
    ) -> None:
        """On the chief: set an optimizer's slots on the servers."""
        if not self.session.is_chief:
            return
        self.settle()
        self.remote.restore_slots(
            optimizer, {_slot_named(name): array for name, array in arrays.items()}
        )

    def begin(self) -> None:
        """Pull the newest values, unless a `fit` is running."""
        if self.fit_metrics is None:
            self.refresh()

    def settle(self) -> None:
        """Wait for the push in flight, if any: its update is then applied."""
        pushes, self._in_flight = self._in_flight, []
        if pushes:
            (first, *_) = [group.await_push(push) for group, push in pushes]
            self.session.staleness[first] += 1
            self.session.steps += 1


def _slot_named(name: str) -> VariableSlot:
    slot, _, variable = name.rpartition("/")
    return (slot, int(variable)) if variable.isdigit() else (name, None)


def _values(variables: Sequence[Variable]) -> dict[int, jax.Array]:
    """The values of variables, by their ids."""
    return dict(zip(map(id, variables), internals.read_values(variables), strict=True))


def _have_values(group: RemoteGroup) -> bool:
    return all(map(internals.has_value, group.variables))


@jax.jit
def _difference(new: jax.Array, old: jax.Array) -> jax.Array:
    return new - old
