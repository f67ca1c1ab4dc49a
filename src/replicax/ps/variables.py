"""Places a program's variables on servers, pushes updates, takes new values."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding

from replicax._private import keras as internals
from replicax._util.hashes import digest
from replicax._util.types import JSONObject
from replicax.engine import device_put
from replicax.engine.scope import outside_scopes
from replicax.engine.variables import Update
from replicax.ps.optimizers import can_split, clip_before_push, optimizer_rule
from replicax.ps.partition import Partitioner, VariableInfo, place
from replicax.ps.remote import RemoteGroup, ServerPushes, WorkerShare
from replicax.ps.requests import GroupRequests
from replicax.ps.rows import RemoteTables, RowPush
from replicax.ps.session import Session
from replicax.ps.variable_slices import VariableGroup

__all__ = ["RemoteVariables"]

_logger = logging.getLogger("replicax")


class RemoteVariables:
    """The variables of a worker that lie on servers.

    Those that one optimizer trains are a group. Moving statistics, to which workers
    add what changed, are in groups of their own.

    Args:
        session: This worker's session.
        sharding: Of values on this worker's devices.
        num_servers: Number of servers.
        partitioner: How variables are cut; None: not at all.
        compression: Dtype in which float32 gradients travel.
        sync: Whether workers make each step together.
        rows: The rows that are updated with the variables.
    """

    def __init__(
        self,
        session: Session,
        sharding: NamedSharding,
        *,
        num_servers: int,
        partitioner: Partitioner | None,
        compression: str | None,
        sync: bool,
        rows: RemoteTables,
    ) -> None:
        self._session = session
        self._sharding = sharding
        self._num_servers = num_servers
        self._partitioner = partitioner
        self._compression = compression
        self._sync = sync
        self._rows = rows
        self._groups: list[tuple[RemoteGroup, list[keras.Variable]]] = []
        self._trained: dict[
            int, tuple[RemoteGroup, list[keras.Variable]]
        ] = {}  # By optimizer.
        self._optimizers: list[tuple[RemoteGroup, keras.optimizers.Optimizer]] = []
        self._states: dict[
            tuple[int, ...], tuple[RemoteGroup, list[keras.Variable]]
        ] = {}
        self._first_steps: dict[str, int] = {}
        self._handed: dict[
            str, list[jax.Array]
        ] = {}  # Values that were put in `stored`.
        self._rates: dict[int, tuple[Any, float | None]] = {}
        self.wanted: GroupRequests | None = None

    @property
    def num_updates(self) -> dict[str, int]:
        """Updates of each group that this worker knows of."""
        return {g.group.name: max(g.versions.values()) for g, _ in self._groups}

    @property
    def num_assigned(self) -> dict[str, int]:
        """How many of each group's updates were assignments, as far as known here."""
        return {g.group.name: g.num_assigned for g, _ in self._groups}

    def begin_epoch(
        self, num_updates: Mapping[str, int], num_assigned: Mapping[str, int]
    ) -> None:
        """Count the steps of an epoch from these numbers of updates."""
        self._first_steps = dict(num_updates)
        for group, _ in self._groups:
            group.num_assigned = num_assigned.get(group.group.name, 0)

    def _part_of(
        self, group: RemoteGroup, part: WorkerShare | None
    ) -> WorkerShare | None:
        if part is None:
            return None
        if part.step is None:
            step = max(group.versions.values())
        else:
            step = self._first_steps.get(group.group.name, 0) + part.step
        return dataclasses.replace(part, step=step)

    def prepared(
        self, optimizer: keras.optimizers.Optimizer, grads: list[jax.Array | None]
    ) -> list[jax.Array | None]:
        """Gradients as servers expect them."""
        if self._sync or not _clips(optimizer):
            return grads
        return clip_before_push(optimizer, grads)

    def connect(
        self,
        updates: Sequence[Update],
        state: Sequence[keras.Variable],
        stored: dict[int, jax.Array],
    ) -> None:
        """Make sure that servers have these variables, and have `stored` say theirs.

        Args:
            updates: The updates of a program.
            state: Its moving statistics.
            stored: The values of its variables by id; those that servers have are
                replaced.
        """
        for update in updates:
            self._connect_update(update, stored)
        key = tuple(map(id, state))
        if state and key not in self._states:
            self._states[key] = self._add("state", {"kind": "add"}, state, stored)
        elif state:
            self._take_over(self._states[key], stored)

    @property
    def versions(self) -> dict[str, dict[int, int]]:
        """Of the newest known values, by group and server."""
        return {group.group.name: dict(group.versions) for group, _ in self._groups}

    def publish(self) -> None:
        """Send values that the user has assigned to the servers; the chief does."""
        for group, variables in self._groups:
            if not all(map(internals.has_value, variables)):
                continue
            given = internals.read_values(variables)
            if not self._is_handed(group, given) and self._differ(group, given):
                group.assign(given)
                internals.write_values(variables, group.values)
                self._handed[group.group.name] = group.values

    def publish_rate(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Send a learning rate that the user has assigned; the chief does."""
        found = self._trained.get(id(optimizer))
        if found is not None:
            self._follow_rate(optimizer, found, {})

    def write_averages(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Store the optimizer's moving averages in the variables that it trains."""
        found = self._trained.get(id(optimizer))
        if found is None:
            return
        group, variables = found
        averages = group.averages()
        if averages is not None:
            internals.write_values(variables, averages)

    def pull(self) -> None:
        """Fetch what has changed, for the next step."""
        for group, _ in self._groups:
            group.pull()

    def await_step(
        self,
        updates: Sequence[Update],
        state: Sequence[jax.Array],
        part: WorkerShare,
        stored: dict[int, jax.Array],
    ) -> bool:
        """Have `stored` say the values that a synchronous step begins with.

        A worker whose last part others had brought already has not seen that step's
        end, and waits for it here.

        Returns:
            False if this step is made by now, at some server: others have brought this
            part too, and of the values that it begins with some are gone.
        """
        for group, variables in self._of(updates, state):
            own = self._part_of(group, part)
            assert own is not None

            def made(
                group: RemoteGroup = group, wanted: int = own.step or 0
            ) -> bool | None:
                if group.has_begun(wanted):
                    return True
                group.pull()
                return None

            self._session.wait(
                made,
                f"step {own.step} of {group.group.name!r}",
                lambda: "another worker",
            )
            self._hand_out(group, variables, stored)
            if group.has_ended(own.step or 0):
                return False
        return True

    def _of(
        self, updates: Sequence[Update], state: Sequence[jax.Array]
    ) -> list[tuple[RemoteGroup, list[keras.Variable]]]:
        """The groups of a program, with their variables."""
        found = [self._trained[id(update.optimizer)] for update in updates]
        if state:
            found.append(self._states[tuple(map(id, state))])
        return found

    def refresh(self) -> None:
        """Fetch what has changed, into the variables that nobody has assigned to."""
        for group, variables in self._groups:
            group.pull()
            if not all(map(internals.has_value, variables)):
                continue
            # Under a coordinator only the chief assigns; the others' scripts do too.
            follows = self.wanted is not None and not self._session.is_chief
            if follows or self._is_handed(group, internals.read_values(variables)):
                internals.write_values(variables, group.values)
                self._handed[group.group.name] = group.values
        self.write_iterations()

    def push(
        self,
        updates: Sequence[Update],
        gradients: Sequence[Sequence[jax.Array]],
        state: Sequence[jax.Array],
        deltas: Sequence[jax.Array],
        based_on: Mapping[str, Mapping[int, int]],
        part: WorkerShare | None,
    ) -> list[tuple[RemoteGroup, ServerPushes]]:
        """Send what a step has computed; `finish` waits for it."""
        pushes = []
        for update, grads in zip(updates, gradients, strict=True):
            group, _ = self._trained[id(update.optimizer)]
            based = based_on[group.group.name]
            own = self._part_of(group, part)
            pushes.append((group, group.push(grads, based, own)))
        if state:
            group, _ = self._states[tuple(map(id, state))]
            based = based_on[group.group.name]
            own = self._part_of(group, part)
            pushes.append((group, group.push(deltas, based, own)))
        return pushes

    def push_rows(
        self, updates: Sequence[Update], part: WorkerShare | None
    ) -> list[RowPush]:
        """Send the gradients of rows; `RemoteTables.finish` waits for it."""
        pushes = []
        for update in updates:
            group, variables = self._trained[id(update.optimizer)]
            own = self._part_of(group, part)
            pushes += self._rows.push(group.group, variables, own)
        return pushes

    def finish(self, pushes: Sequence[tuple[RemoteGroup, ServerPushes]]) -> bool:
        """Wait for pushes; whether they count."""
        results = [group.finish(push) for group, push in pushes]
        # Groups may have got the part from different workers; the first one decides.
        counts = not results or results[0].counts
        if results and counts:
            self._session.staleness[results[0].staleness] += 1
        self._session.steps += 1
        return counts

    def write_iterations(self) -> None:
        """Store in each optimizer how many updates the servers have made with it."""
        for group, optimizer in self._optimizers:
            iterations = optimizer.variables[0]
            if internals.has_value(iterations):
                internals.write_values(
                    [iterations], [self._iterations(group, iterations)]
                )

    def _iterations(self, group: RemoteGroup, variable: keras.Variable) -> Any:
        made = max(group.versions.values()) - group.num_assigned
        number = np.asarray(made + group.group.rule["iterations"], variable.dtype)
        return device_put.laid_out(number, self._sharding)

    def write_back(
        self,
        updates: Sequence[Update],
        state: Sequence[jax.Array],
        stored: dict[int, jax.Array],
    ) -> None:
        """Put the newest known values where a program's new ones belong."""
        for update in updates:
            group, variables = self._trained[id(update.optimizer)]
            self._hand_out(group, variables, stored)
            iterations = update.optimizer.variables[0]
            stored[id(iterations)] = self._iterations(group, iterations)
        if state:
            self._hand_out(*self._states[tuple(map(id, state))], stored)

    def _hand_out(
        self,
        group: RemoteGroup,
        variables: Sequence[keras.Variable],
        stored: dict[int, jax.Array],
    ) -> None:
        stored |= zip(map(id, variables), group.values, strict=True)
        self._handed[group.group.name] = group.values

    def _is_handed(self, group: RemoteGroup, values: Sequence[jax.Array]) -> bool:
        """Whether these are values that this object has given, not a user."""
        handed = self._handed[group.group.name]
        return all(
            a is b or _same_memory(a, b) for a, b in zip(values, handed, strict=True)
        )

    def _differ(self, group: RemoteGroup, values: Sequence[jax.Array]) -> bool:
        """Whether values are others than those that this object has given."""
        handed = self._handed[group.group.name]
        return not _are_equal(values, handed)

    def _connect_update(self, update: Update, stored: dict[int, jax.Array]) -> None:
        optimizer = update.optimizer
        variables = list(update.variables)
        found = self._trained.get(id(optimizer))
        if found is None:
            rule = self._rule(optimizer, variables, stored)
            found = self._add(
                optimizer.name,
                rule,
                variables,
                stored,
                can_split(optimizer),
                optimizer,
            )
            self._trained[id(optimizer)] = found
            self._optimizers.append((found[0], optimizer))
            self._rates[id(optimizer)] = (None, _rate(optimizer, stored))
        if [id(v) for v in found[1]] != [id(v) for v in variables]:
            raise NotImplementedError(
                f"ParameterServerStrategy: optimizer {optimizer.name!r} has gradients "
                f"for {len(variables)} variables in this step and had them for "
                f"{len(found[1])} others before. Use one optimizer for each set of "
                "variables."
            )
        self._take_over(found, stored)
        self._rows.connect(found[0].group, variables)
        self._follow_rate(optimizer, found, stored)

    def _rule(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: list[keras.Variable],
        stored: Mapping[int, jax.Array],
    ) -> JSONObject:
        own = optimizer.variables
        before = internals.read_values(own)  # `fit` has taken them away.
        internals.write_values(own, [stored[id(v)] for v in own])
        try:
            with outside_scopes():  # It builds the optimizer once, to try.
                return optimizer_rule(
                    optimizer,
                    variables,
                    clipped_by_worker=not self._sync and _clips(optimizer),
                )
        finally:
            internals.write_values(own, before)

    def _follow_rate(
        self,
        optimizer: keras.optimizers.Optimizer,
        found: tuple[RemoteGroup, list[keras.Variable]],
        stored: Mapping[int, jax.Array],
    ) -> None:
        """A learning rate that was assigned, as callbacks do, goes to the servers."""
        known, rate = self._rates[id(optimizer)]
        array = _rate_array(optimizer, stored)
        if array is None or array is known:
            return
        now = _rate(optimizer, stored)
        if now is not None and now != rate and self._session.is_chief:
            group, variables = found
            group.assign_rate(now)
            self._rows.assign_rate(variables, now)
        self._rates[id(optimizer)] = (array, now)

    def _take_over(
        self,
        found: tuple[RemoteGroup, list[keras.Variable]],
        stored: dict[int, jax.Array],
    ) -> None:
        """Values that a user has assigned go to the servers, from the chief."""
        group, variables = found
        given = [stored[id(v)] for v in variables]
        if not self._is_handed(group, given) and self._differ(group, given):
            if self._session.is_chief:
                group.assign(given)
            elif not _are_equal(given, group.values):  # Else the chief has as well.
                _logger.warning(
                    "%s: values were assigned to variables of %s; those of the servers "
                    "are used instead. Assign on the chief.",
                    self._session.name,
                    group.group.name,
                )
        self._hand_out(group, variables, stored)

    def _name(self, label: str, variables: Sequence[keras.Variable]) -> str:
        """The same on all workers, also on one that had no step of an earlier group."""
        paths = "\n".join(v.path for v in variables)
        name = f"{label} {digest(paths, 4)}"
        again = sum(g.group.name.startswith(name) for g, _ in self._groups)
        return f"{name} {again + 1}" if again else name

    def _add(
        self,
        label: str,
        rule: JSONObject,
        variables: Sequence[keras.Variable],
        stored: dict[int, jax.Array],
        can_split: bool = True,
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> tuple[RemoteGroup, list[keras.Variable]]:
        if self.wanted is None:
            name = self._name(label, variables)
        else:
            name = self.wanted.name_of(label, list(variables), optimizer)
        for known in self._groups:
            if known[0].group.name == name:  # Adopted before.
                self._hand_out(*known, stored)
                return known
        placed = place(
            name,
            rule,
            [_info(v) for v in variables],
            self._num_servers,
            self._partitioner,
            can_split,
        )
        group = self._remote_group(placed)
        if self._session.is_chief:
            group.create([stored[id(v)] for v in variables])
        else:
            if self.wanted is not None:
                self.wanted.ask(placed, list(variables), optimizer)
            group.require_created()
        group.pull()
        self._hand_out(group, variables, stored)
        self._groups.append((group, list(variables)))
        return self._groups[-1]

    def adopt(
        self, placed: VariableGroup, variables: Sequence[keras.Variable]
    ) -> RemoteGroup | None:
        """Take over a group that another worker has found.

        The chief creates it, with the values here.

        Returns:
            The group; None: the chief has not created it yet.
        """
        for known, _ in self._groups:
            if known.group.name == placed.name:
                return known
        group = self._remote_group(placed)
        if self._session.is_chief:
            group.create(internals.read_values(variables))
        elif group.is_created():
            group.require_created()
        else:
            return None
        group.pull()
        internals.write_values(variables, group.values)
        self._handed[placed.name] = group.values
        self._groups.append((group, list(variables)))
        return group

    def _remote_group(self, placed: VariableGroup) -> RemoteGroup:
        return RemoteGroup(
            self._session,
            placed,
            self._sharding,
            self._compression if placed.rule["kind"] == "optimizer" else None,
        )


def _info(variable: keras.Variable) -> VariableInfo:
    constraint = getattr(variable, "constraint", None)
    config: Any = (
        None if constraint is None else keras.constraints.serialize(constraint)
    )
    return VariableInfo(
        path=variable.path,
        shape=tuple(variable.shape),
        dtype=str(variable.dtype),
        constraint=config,
    )


def _clips(optimizer: keras.optimizers.Optimizer) -> bool:
    return any(
        getattr(optimizer, name, None) is not None
        for name in ("clipnorm", "clipvalue", "global_clipnorm")
    )


def _rate(
    optimizer: keras.optimizers.Optimizer, stored: Mapping[int, jax.Array]
) -> float | None:
    """The learning rate that was assigned; None where a schedule decides."""
    array = _rate_array(optimizer, stored)
    return None if array is None else float(np.asarray(array.addressable_data(0)))


def _rate_array(
    optimizer: keras.optimizers.Optimizer, stored: Mapping[int, jax.Array]
) -> Any:
    variable = getattr(optimizer, "_learning_rate", None)
    if not isinstance(variable, keras.Variable):
        return None
    value = stored.get(id(variable))
    return internals.read_values([variable])[0] if value is None else value


def _are_equal(values: Sequence[jax.Array], others: Sequence[jax.Array]) -> bool:
    return all(
        np.array_equal(_host(a), _host(b)) for a, b in zip(values, others, strict=True)
    )


def _host(value: jax.Array) -> np.ndarray:
    return np.asarray(device_put.local_value(value))


def _same_memory(a: jax.Array, b: jax.Array) -> bool:
    if not isinstance(a, jax.Array) or a.is_deleted() or b.is_deleted():
        return False
    return (
        a.addressable_data(0).unsafe_buffer_pointer()
        == b.addressable_data(0).unsafe_buffer_pointer()
    )
