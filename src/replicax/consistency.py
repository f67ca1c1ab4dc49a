"""Whether the replicas' copies of variables are equal."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicax import fingerprints
from replicax.cluster.workers import Workers
from replicax.errors import DivergenceError
from replicax.group import ReplicaGroup
from replicax.keras import internals

__all__ = ["CreatedVariables", "require_equal"]


class CreatedVariables:
    """The variables that were created in a strategy's scope and are still there."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}
        self._count = 0

    def add(self, variable: Any) -> None:
        """Note a variable, for as long as somebody else keeps it."""
        self._known[self._count] = weakref.ref(variable)
        self._count += 1
        if self._count % 1024 == 0:
            self._known = {n: r for n, r in self._known.items() if r() is not None}

    def of_all_workers(self, workers: Workers) -> list[Any]:
        """Those that every worker still has, in the order of their creation.

        Python frees a model when it likes: another worker may have freed one already.
        """
        alive = {
            str(number): variable
            for number, variable in [(n, ref()) for n, ref in self._known.items()]
            if variable is not None and internals.has_value(variable)
        }
        mine = {number: internals.described(v) for number, v in alive.items()}
        of_all = workers.exchange("variables", mine)
        return [
            variable
            for number, variable in alive.items()
            if all(other.get(number) == mine[number] for other in of_all)
        ]


def require_equal(
    group: ReplicaGroup, variables: Sequence[Any], values: Sequence[Any]
) -> None:
    """Compare the devices' copies of variables, bit by bit.

    Variables of which each device holds a block have no copies and are left out.

    Raises:
        DivergenceError: Naming the variables that differ and where.
    """
    layouts = group.layouts
    copied = [
        (v, x)
        for v, x in zip(variables, values, strict=True)
        if layouts.dim_in(layouts.of(v)) is None
    ]
    prints = fingerprints.per_replica(
        [x for _, x in copied], group.mesh, group.axis.name
    )
    differing = np.flatnonzero((prints != prints[:1]).any(axis=0))
    if not differing.size:
        return
    found = "; ".join(
        f"{copied[i][0].path!r} on {_numbers(group, prints[:, i])}"
        for i in differing.tolist()
    )
    raise DivergenceError(
        f"Strategy.check_replicas: copies differ from replica 0's: {found}. The "
        "replicas have drifted apart; restart from a checkpoint, and look for "
        "host callbacks or random numbers outside Keras' SeedGenerator in the step."
    )


def _numbers(group: ReplicaGroup, prints: np.ndarray) -> str:
    devices = np.flatnonzero(prints != prints[0])
    each = group.axes.num_per_device
    replicas = [d * each + i for d in devices.tolist() for i in range(each)]
    return f"replicas {replicas}"
