"""Variables that closures assign by themselves, without an optimizer."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from replicax._private import keras as internals
from replicax.engine.consistency import Label, Labels
from replicax.engine.variables import Variable, is_seed_state
from replicax.ps.variables import RemoteVariables

__all__ = ["AssignedVariables"]


class AssignedVariables:
    """Variables such as a step counter, which servers store once a closure assigns one.

    A worker adds to a variable on its server by how much a closure has changed it, and
    fetches the newest value before its next closure. So the additions of all workers
    count, each once, and the chief and later closures see them. Metrics, and what steps
    change, such as trained variables, travel in other ways.
    """

    def __init__(self, remote: RemoteVariables, labels: Labels) -> None:
        self._remote = remote
        self._labels = labels
        self._before: dict[Label, jax.Array] = {}

    def begin(self, *, is_fresh: bool) -> None:
        """Record all values at the begin of a closure.

        Args:
            is_fresh: Whether they are the newest; else those are fetched before.
        """
        for group in () if is_fresh else self._remote.assigned:
            group.pull()
            group.write()
        self._before = {
            label: internals.read_values([variable])[0]
            for label, variable in self._candidates()
        }

    def push(self) -> None:
        """Add the changes since `begin` to the values on the servers."""
        for label, variable in self._candidates():
            before = self._before.get(label)
            (now,) = internals.read_values([variable])
            if before is None or now is before or bool(jnp.array_equal(now, before)):
                continue
            group = self._remote.connect_assigned(variable, before)
            group.finish(group.push([now - before], dict(group.versions), None))
            group.write()

    def _candidates(self) -> Iterator[tuple[Label, Variable]]:
        """Variables that closures may assign and that nothing else brings to others."""
        known = self._remote.variables_of_steps()
        for label, variable in self._labels:
            if (
                variable.aggregation != "sum"  # Those are metrics.
                and variable.dtype != "bool"
                and internals.has_value(variable)
                and id(variable) not in known
                and not is_seed_state(variable)
            ):
                yield label, variable
