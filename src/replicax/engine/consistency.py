"""Whether the replicas' copies of variables are equal."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicax._private import keras as internals
from replicax.cluster.workers import Workers
from replicax.engine import fingerprints
from replicax.engine.group import ReplicaGroup
from replicax.engine.labels import Labels
from replicax.errors import DivergenceError

__all__ = ["of_all_workers", "require_equal"]


def of_all_workers(labels: Labels, workers: Workers) -> list[Any]:
    """The labelled variables that every worker has a value of, in a common order.

    Python frees a model when it likes: another worker may have freed one already.
    """
    alive = {json.dumps(k): v for k, v in labels if internals.has_value(v)}
    mine = {label: internals.described(v) for label, v in alive.items()}
    of_all = workers.exchange("variables", mine)
    return [
        alive[label]
        for label in sorted(alive)
        if all(other.get(label) == mine[label] for other in of_all)
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
