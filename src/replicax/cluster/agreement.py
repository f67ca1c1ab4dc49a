"""Comparison of a new program on all workers, before it runs first."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from replicax._util.hashes import digest
from replicax.cluster.workers import Workers
from replicax.errors import ClusterMismatchError

__all__ = ["agree"]


def agree(workers: Workers, facts: Mapping[str, Any], what: str) -> int:
    """Compare facts that must be the same on all workers.

    Digests are exchanged; only where they differ is the fact itself.

    Args:
        workers: Who compares.
        facts: By name, in the order in which a difference tells most. JSON values; a
            list is compared entry by entry.
        what: What the facts are about, such as `"the program of run(step)"`.

    Returns:
        How many agreements the workers have come to, the same number on all.

    Raises:
        ClusterMismatchError: On all workers, with the first difference.
    """
    digests = {
        name: digest(json.dumps(fact, sort_keys=True)) for name, fact in facts.items()
    }
    all_digests = workers.exchange(
        "program",
        digests,
        overtaken=lambda name: (
            f"{workers.name} has to compile {what}, but {name} went on with a program "
            "that it has already. Their batches differ in shape, or they run different "
            "steps."
        ),
        what=f"the agreement on {what}",
    )
    for name in facts:
        column = [digests.get(name) for digests in all_digests]
        if len(set(column)) > 1:
            values = workers.exchange("difference", facts[name], timeout_seconds=10)
            raise ClusterMismatchError(_difference(workers, what, name, values))
    return workers.new_agreement()


def _difference(workers: Workers, what: str, name: str, values: Sequence[Any]) -> str:
    """The first difference between worker 0 and the first worker that differs."""
    other = next(i for i, value in enumerate(values) if value != values[0])
    mine, its = values[0], values[other]
    if isinstance(mine, list) and isinstance(its, list):
        pairs = list(zip(mine, its, strict=False))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        name = f"{name}, entry {place}"
        mine = mine[place] if place < len(mine) else "nothing"
        its = its[place] if place < len(its) else "nothing"
    elif isinstance(mine, dict) and isinstance(its, dict):
        key = next(k for k in [*mine, *its] if mine.get(k) != its.get(k))
        name = f"{name}, {key}"
        mine, its = mine.get(key), its.get(key)
    return (
        f"the workers differ in {what}: {name} is {mine!r} on {workers.names[0]} and "
        f"{its!r} on {workers.names[other]}. All workers must run the same script with "
        "the same arguments and versions."
    )
