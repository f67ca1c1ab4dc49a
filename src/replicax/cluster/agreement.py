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
        while_waiting=_Overtaken(workers, what),
        what=f"the agreement on {what}",
    )
    for name in facts:
        column = [digests.get(name) for digests in all_digests]
        if len(set(column)) > 1:
            values = workers.exchange("difference", facts[name], timeout_seconds=10)
            raise ClusterMismatchError(_difference(workers, what, name, values))
    return workers.new_agreement()


class _Overtaken:
    """Notices that a worker runs on, without the new program that others have.

    It is then in a collective of the step that this one has not begun.
    """

    def __init__(self, workers: Workers, what: str) -> None:
        self._workers = workers
        self._what = what
        self._before = _num_dispatched(workers)

    def __call__(self, missing: Sequence[int]) -> None:
        now = _num_dispatched(self._workers)
        mine = now[self._workers.index]
        for i in missing:
            if now[i] > max(mine, self._before[i]):
                raise ClusterMismatchError(
                    f"{self._workers.name} has to compile {self._what}, but "
                    f"{self._workers.names[i]} went on with a program that it has "
                    "already. Their batches differ in shape, or they run different "
                    "steps."
                )


def _num_dispatched(workers: Workers) -> list[int]:
    watch = workers.watch
    return [] if watch is None else [sign.dispatched for sign in watch.signs]


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
