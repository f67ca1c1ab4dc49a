"""A group of variables on one server, updated by the user's Keras optimizer."""

import contextlib
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from replicax._util.types import JSONObject
from replicax.ps.call_log import Sessions
from replicax.ps.group_vectors import SlotKey, Slots
from replicax.ps.groups import Arrays, Group
from replicax.ps.limits import RequestError
from replicax.ps.partition import VariableGroup
from replicax.ps.server_optimizer import ServerOptimizer

__all__ = ["DenseGroup"]


class DenseGroup(Group):
    """A group of variables. Its fields are read and written under its `lock`.

    `messages` accepts vectors of the group's dtypes and lengths only, except that
    gradients may also be bfloat16.
    """

    def __init__(
        self,
        group: VariableGroup,
        vectors: Arrays,
        server: int,
        sessions: Sessions | None = None,
    ) -> None:
        super().__init__(f"group {group.name!r}", server, sessions)
        self.group = group
        self.lengths = group.lengths_on(server)
        with _refusing():
            self._optimizer = ServerOptimizer(group, server)
            self.vectors, self._slots = self._optimizer.start(vectors)

    def require_same(self, other: VariableGroup) -> None:
        """Raise if `other`, a new group of the same name, differs."""
        if self.group.digest != other.digest:
            raise RequestError(
                f"{self.what} is here already, and differs from the new one in "
                f"{_difference(self.group, other)}. Give the new one another name, or "
                "restart the servers without their snapshots."
            )

    def replace(self, vectors: Arrays) -> None:
        """Replace the values, which makes a new version; keep the optimizer state."""
        self.vectors, _ = self._optimizer.start(vectors)
        self.version += 1
        self.replacements += 1

    def slots(self) -> Slots:
        """Copies of the optimizer's variables."""
        return self._optimizer.slots(_copies(self._slots))

    def check_slots(
        self, shapes: Mapping[SlotKey, tuple[int, ...]]
    ) -> dict[SlotKey, str]:
        """Check keys and shapes of optimizer variables; return their dtypes."""
        with _refusing():
            return self._optimizer.check_slots(self._slots, shapes)

    def assign_slots(self, slots: Slots) -> None:
        """Set some of the optimizer's variables."""
        with _refusing():
            self._slots = self._optimizer.with_slots(self._slots, slots)
        self.slot_assignments += 1

    def _apply(self, gradients: Arrays) -> None:
        self.vectors, self._slots = self._optimizer.apply(
            self.vectors, self._slots, gradients
        )

    def state(self) -> tuple[dict[str, np.ndarray | jax.Array], JSONObject]:
        """The state: arrays by name, the rest as JSON values."""
        arrays: dict[str, np.ndarray | jax.Array]
        arrays = {f"values/{dtype}": vector for dtype, vector in self.vectors.items()}
        arrays |= {f"slots/{i}": slot for i, slot in enumerate(_copies(self._slots))}
        return arrays, {"group": self.group.to_json(), **self._counts()}

    def load_state(self, arrays: Arrays, meta: JSONObject) -> None:
        """Restore optimizer state and counts; the constructor restored the values."""
        num_slots = sum(name.startswith("slots/") for name in arrays)
        slots = [arrays[f"slots/{i}"] for i in range(num_slots)]
        shapes, expected = (
            [(x.shape, str(x.dtype)) for x in xs] for xs in (slots, self._slots)
        )
        if shapes != expected:
            raise RequestError(
                f"{self.what}: the state has optimizer variables of {shapes}, but this "
                f"version of Keras has {expected}. Use the version that wrote it."
            )
        # One by one: each old slot's memory becomes free for the next slot.
        for i, new in enumerate(slots):
            self._slots[i] = jax.device_put(np.array(new), self._slots[i].device)
        self._load_counts(meta)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RequestError(str(error)) from error


@jax.jit
def _copies(state: list[jax.Array]) -> list[jax.Array]:
    """Copy arrays before a later step donates the originals."""
    return [jnp.copy(x) for x in state]


def _difference(one: VariableGroup, other: VariableGroup) -> str:
    for key in sorted(one.rule.keys() | other.rule.keys()):
        if one.rule.get(key) != other.rule.get(key):
            return f"its {key}: {one.rule.get(key)!r} and {other.rule.get(key)!r}"
    pairs = zip(one.shards, other.shards, strict=False)
    shards = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if shards is None:
        return f"its shards: {len(one.shards)} and {len(other.shards)}"
    return f"shard {shards[0].name!r}: {shards[0]} and {shards[1]}"
