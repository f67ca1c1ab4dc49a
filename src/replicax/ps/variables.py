"""The groups of a program's variables on servers, and their optimizers' state."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding

from replicax._private import keras as internals
from replicax._util.arrays import dtype_on_devices
from replicax._util.hashes import digest
from replicax._util.types import JSONObject
from replicax.engine.scope import outside_scopes
from replicax.engine.variables import Update
from replicax.ps.group_vectors import VariableSlot
from replicax.ps.optimizers import can_split, can_spread, optimizer_rule
from replicax.ps.partition import (
    ADDED,
    ASSIGNED,
    Partitioner,
    VariableGroup,
    VariableInfo,
    place,
)
from replicax.ps.remote import RemoteGroup, key_of
from replicax.ps.remote_optimizer import RemoteOptimizer
from replicax.ps.rows import RemoteTables
from replicax.ps.session import Session

if TYPE_CHECKING:
    from replicax.ps.closure_variables import GroupRequests

__all__ = ["RemoteVariables"]

_Slots = Mapping[VariableSlot, np.ndarray]


class RemoteVariables:
    """A worker's variables that are stored on servers.

    The variables that one optimizer trains are a group. Moving statistics, to which
    workers add the changes of their steps, are in separate groups. `groups` are in the
    order in which this worker connected to them. Under a coordinator, workers use
    `requests` to ask the chief for new groups.
    """

    def __init__(
        self,
        session: Session,
        sharding: NamedSharding,
        *,
        partitioner: Partitioner | None,
        compression: str | None,
        rows: RemoteTables,
    ) -> None:
        self._session = session
        self._sharding = sharding
        self._partitioner = partitioner
        self._compression = compression
        self._rows = rows
        self.groups: list[RemoteGroup] = []
        self._trained: dict[keras.optimizers.Optimizer, RemoteGroup] = {}
        # Slots from a checkpoint, until the optimizer has a group.
        self._restored: dict[keras.optimizers.Optimizer, _Slots] = {}
        self.requests: GroupRequests | None = None
        self._num_steps: dict[str, int] = {}  # By group, at the last `trained_twice`.

    def connect(
        self,
        updates: Sequence[Update],
        state: Sequence[keras.Variable],
        stored: dict[int, jax.Array],
    ) -> list[RemoteGroup]:
        """Return the groups of a program's updates, then of its moving statistics.

        Creates new groups on the servers, and adds the servers' values to `stored`.
        Programs may share some moving statistics. Each statistic is in one group; a
        program ignores the group's other variables.
        """
        groups = [self._connect_update(update, stored) for update in updates]
        return groups + self._connect_added(state, stored)

    def _connect_added(
        self,
        variables: Sequence[keras.Variable],
        stored: dict[int, jax.Array],
    ) -> list[RemoteGroup]:
        ids = set(map(id, variables))
        while True:
            added = [group for group in self.groups if group.placement.rule == ADDED]
            shared = [x for x in added if not ids.isdisjoint(map(id, x.variables))]
            grouped = {id(v) for group in shared for v in group.variables}
            new = [v for v in variables if id(v) not in grouped]
            if not new:
                return shared
            self._add("state", ADDED, new, stored)

    @property
    def assigned(self) -> list[RemoteGroup]:
        """The groups of variables that closures assign and no training step changes."""
        return [group for group in self.groups if group.placement.rule == ASSIGNED]

    def connect_assigned(
        self, variable: keras.Variable, value: jax.Array
    ) -> RemoteGroup:
        """Return the group of a variable that closures assign.

        A new group is created on the servers with the initial `value`.
        """
        for group in self.assigned:
            if group.variables[0] is variable:
                return group
        group = self._add("assigned", ASSIGNED, [variable], {id(variable): value})
        assert group is not None
        return group

    def variables_of_steps(self) -> set[int]:
        """The ids of variables that training steps change, also of the optimizers."""
        groups = [group for group in self.groups if group.placement.rule != ASSIGNED]
        changed = (v for group in groups for v in group.variables)
        own = (v for optimizer in self._trained for v in optimizer.variables)
        return {id(v) for v in (*changed, *own)}

    def on_servers(
        self, optimizer: keras.optimizers.Optimizer
    ) -> RemoteOptimizer | None:
        """The client of an optimizer's state on the servers; None without a group.

        Compares step count variables, because `_trained` lacks the groups that other
        workers requested from a coordinator's chief.
        """
        count, _ = _count_and_rate(optimizer)
        for group in self.groups:
            if group.optimizer is not None and group.optimizer.count is count:
                return group.optimizer
        return None

    def trained_twice(self) -> str | None:
        """On the chief, an error text if two optimizers train one variable, or None.

        Only steps since the last call count. Each group has its own copy of the
        variable, and updates of one copy do not reach the other.
        """
        error, trainers = None, dict[int, RemoteGroup]()
        for group in self.groups:
            previous = self._num_steps.get(group.name, 0)
            self._num_steps[group.name] = group.steps
            trains = group.optimizer is not None and group.steps > previous
            for variable in group.variables if trains else ():
                other = trainers.setdefault(id(variable), group)
                if other is not group:
                    error = (
                        f"ParameterServerStrategy: variable {variable.path!r} is "
                        f"trained by two optimizers at a time, in {other.name!r} and "
                        f"{group.name!r}. On servers each optimizer updates its own "
                        "copy. Train the variable with one optimizer, or call "
                        "coordinator.join() before you schedule the functions of the "
                        "other optimizer."
                    )
        return error

    def slots(self, optimizer: keras.optimizers.Optimizer) -> _Slots:
        """An optimizer's slots on the servers; without a group, those to restore."""
        remote = self.on_servers(optimizer)
        if remote is None:
            return self._restored.get(optimizer, {})
        return remote.slots()

    def restore_slots(
        self, optimizer: keras.optimizers.Optimizer, slots: _Slots
    ) -> None:
        """Restore an optimizer's slots, now or when its groups are created."""
        remote = self.on_servers(optimizer)
        if remote is None:
            self._restored[optimizer] = slots
        else:
            remote.restore(slots)

    # New groups.

    def _connect_update(
        self, update: Update, stored: dict[int, jax.Array]
    ) -> RemoteGroup:
        optimizer = update.optimizer
        variables = list(update.variables)
        group = self._trained.get(optimizer)
        if group is None:
            rule = self._rule(optimizer, variables, stored)
            group = self._add(optimizer.name, rule, variables, stored, optimizer)
            assert group is not None  # Only moving statistics are shared.
        if [id(v) for v in group.variables] != [id(v) for v in variables]:
            raise NotImplementedError(
                f"ParameterServerStrategy: optimizer {optimizer.name!r} has gradients "
                f"for {len(variables)} variables in this step; before, it had "
                f"gradients for {len(group.variables)} other variables. Use one "
                "optimizer for each set of variables."
            )
        self._rows.connect(group.placement, variables)
        return group

    def _rule(
        self,
        optimizer: keras.optimizers.Optimizer,
        variables: list[keras.Variable],
        stored: Mapping[int, jax.Array],
    ) -> JSONObject:
        own = optimizer.variables
        values = internals.read_values(own)  # None in `fit`: only `stored` has them.
        internals.write_values(own, [stored[id(v)] for v in own])
        try:
            with outside_scopes():  # `optimizer_rule` builds a copy of the optimizer.
                return optimizer_rule(optimizer, variables)
        finally:
            internals.write_values(own, values)

    def _add(
        self,
        label: str,
        rule: JSONObject,
        variables: Sequence[keras.Variable],
        stored: dict[int, jax.Array],
        optimizer: keras.optimizers.Optimizer | None = None,
    ) -> RemoteGroup | None:
        """Add the group of variables that a program updates together.

        Returns None if another worker's group has some of the moving statistics; this
        worker has then adopted that group.
        """
        requests = self.requests
        count, rate = (None, None) if optimizer is None else _count_and_rate(optimizer)
        if requests is None:
            name = self._name(label, variables)
        else:
            name = requests.name_of(label, variables, count)
        group = self._named(name)
        if group is None:
            placed = place(
                name,
                rule,
                [_info(v) for v in variables],
                len(self._session.connections),
                self._partitioner,
                optimizer is None or can_split(optimizer),
                optimizer is None or can_spread(optimizer),
            )
            if requests is not None and not self._session.is_chief:
                earlier = list(self.groups)
                if not requests.ask(placed, variables, [count, rate]):
                    for adopted in self.groups:
                        if adopted not in earlier:
                            adopted.hand_out(stored)
                    return None
            values = [stored[id(v)] for v in variables]
            group = self._join(placed, variables, values, self._restored_for(count))
        if optimizer is not None:
            self._trained[optimizer] = group
        if group.optimizer is not None:
            group.optimizer.watch(count, rate)
        group.hand_out(stored)
        return group

    def _restored_for(self, count: keras.Variable | None) -> _Slots:
        """Pop the slots to restore, for the optimizer with this step count variable."""
        for optimizer in self._restored:
            if _count_and_rate(optimizer)[0] is count:
                return self._restored.pop(optimizer)
        return {}

    def _named(self, name: str) -> RemoteGroup | None:
        return next((group for group in self.groups if group.name == name), None)

    def _name(self, label: str, variables: Sequence[keras.Variable]) -> str:
        """A new group's name: equal on all workers, whatever groups they have."""
        paths = "\n".join(v.path for v in variables)
        name = f"{label} {digest(paths, 4)}"
        again = sum(group.name.startswith(name) for group in self.groups)
        return f"{name} {again + 1}" if again else name

    def adopt(
        self,
        placed: VariableGroup,
        variables: Sequence[keras.Variable],
        count: keras.Variable | None,
    ) -> RemoteGroup | None:
        """Connect to a group that a worker requested; None if it is not created yet.

        `count` is the step count variable of the group's optimizer.
        """
        group = self._named(placed.name)
        if group is not None:
            return group
        key = key_of(placed.name)
        if self._session.is_chief or self._session.board("get", key=key) is not None:
            values = internals.read_values(variables)
            group = self._join(placed, variables, values, self._restored_for(count))
            group.write()
        return group

    def _join(
        self,
        placed: VariableGroup,
        variables: Sequence[keras.Variable],
        values: Sequence[jax.Array],
        slots: _Slots | None = None,
    ) -> RemoteGroup:
        """Connect to a group: the chief creates it, other workers wait for the chief.

        Values that closures have assigned to the variables replace `values`.
        """
        compression = self._compression if placed.is_trained else None
        group = RemoteGroup(
            self._session, placed, self._sharding, compression, variables
        )
        ids = set(map(id, variables))
        replaced = [x for x in self.assigned if id(x.variables[0]) in ids]
        if self._session.is_chief:
            for assigned in replaced:
                assigned.pull()
            newest = {id(x.variables[0]): x.values[0] for x in replaced}
            pairs = zip(variables, values, strict=True)
            group.create([newest.get(id(v), value) for v, value in pairs], slots)
        else:
            group.require_created()
        group.pull()
        is_superseded = placed.rule == ASSIGNED and (
            id(variables[0]) in self.variables_of_steps()  # A step's group has it.
        )
        self.groups = [x for x in self.groups if x not in replaced]
        self.groups += [] if is_superseded else [group]
        self._num_steps[group.name] = group.steps
        return group


def _count_and_rate(
    optimizer: keras.optimizers.Optimizer,
) -> tuple[keras.Variable, keras.Variable | None]:
    """An optimizer's variables of its step count and, if it has one, its rate.

    With gradient accumulation `optimizer.iterations` counts updates, not steps.
    """
    return optimizer.variables[0], internals.learning_rate_of(optimizer)


def _info(variable: keras.Variable) -> VariableInfo:
    constraint = getattr(variable, "constraint", None)
    config: Any = (
        None if constraint is None else keras.constraints.serialize(constraint)
    )
    return VariableInfo(
        path=variable.path,
        shape=tuple(variable.shape),
        # The array's dtype: without JAX's x64 an "int64" variable holds int32.
        dtype=str(dtype_on_devices(internals.stored_dtype(variable))),
        constraint=config,
    )
