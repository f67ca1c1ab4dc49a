"""The state of a tiny model, between steps, as one array of each dtype.

A call of a program passes every array of its state in and out, at a microsecond or two
each on a CPU. Of a model that computes for a few microseconds that is most of a step,
so its state stays in one piece for as long as nobody looks at it.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from replicax.group import ReplicaGroup
from replicax.variables import Variable

__all__ = ["MOST_BYTES", "RaveledValues", "Raveling"]

# Taken apart and put together, state is copied, twice a step. Up to this size that
# takes less time than passing its arrays.
MOST_BYTES = 2**16


class Raveling:
    """How values of some shapes become one array of each dtype, and return.

    Args:
        shapes: The values' shapes.
        dtypes: Their dtypes.
        sharding: Where they lie, each of them whole on all devices.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[np.dtype[Any]],
        sharding: NamedSharding,
    ) -> None:
        self._shapes = shapes
        self._sharding = sharding
        self._members = {d: [i for i, x in enumerate(dtypes) if x == d] for d in dtypes}
        self._taken_apart = jax.jit(self.unravel, out_shardings=sharding)

    @staticmethod
    def of_variables(
        variables: Sequence[Variable], group: ReplicaGroup
    ) -> "Raveling | None":
        """The one for the values of variables that all replicas hold, on CPUs."""
        if not group.axis.is_of_cpus or any(
            group.layout(v) != group.mirrored for v in variables
        ):
            return None
        return Raveling.of(
            tuple(tuple(v.shape) for v in variables),
            tuple(np.dtype(v.dtype) for v in variables),
            group.mirrored,
        )

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[np.dtype[Any], ...],
        sharding: NamedSharding,
    ) -> "Raveling | None":
        """The one for such values: the same object for the same ones.

        Returns:
            None for values that are better passed one by one: few, or large.

        Example:
            >>> from jax.sharding import PartitionSpec
            >>> mesh = jax.make_mesh((1,), ("replica",))
            >>> where = NamedSharding(mesh, PartitionSpec())
            >>> raveling = Raveling.of(((2,), (), (1,)), (np.dtype("f4"),) * 3, where)
            >>> values = raveling.of_values([np.ones(2), np.zeros(()), np.zeros(1)])
            >>> print(*values)
            [1. 1.] 0.0 [0.]
        """
        num_bytes = sum(
            math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True)
        )
        if num_bytes > MOST_BYTES or len(shapes) <= len(set(dtypes)):
            return None
        return Raveling(shapes, dtypes, sharding)

    @property
    def num_values(self) -> int:
        """How many values there are."""
        return len(self._shapes)

    @property
    def shardings(self) -> list[NamedSharding]:
        """Where the arrays lie."""
        return [self._sharding] * len(self._members)

    def ravel(self, values: Sequence[Any]) -> list[jax.Array]:
        """The arrays, in a program."""
        return [
            jnp.concatenate([values[i].ravel() for i in members])
            for members in self._members.values()
        ]

    def unravel(self, arrays: Sequence[Any]) -> list[Any]:
        """The values again, in a program."""
        values: list[Any] = [None] * len(self._shapes)
        for array, members in zip(arrays, self._members.values(), strict=True):
            start = 0
            for i in members:
                stop = start + math.prod(self._shapes[i])
                values[i] = array[start:stop].reshape(self._shapes[i])
                start = stop
        return values

    def of_values(self, values: Sequence[Any]) -> "RaveledValues":
        """Values on the devices or the host, put together here; no program runs."""
        copies = [_by_device(x, self._sharding) for x in values]
        return RaveledValues(self, [self._joined(copies, d) for d in self._members])

    def _joined(self, copies: list[dict[Any, Any]], dtype: Any) -> jax.Array:
        """The values of one dtype, from each device's copies of all values."""
        members = self._members[dtype]
        parts = []
        for device in self._sharding.addressable_devices:
            flat = [np.asarray(copies[i][device], dtype).ravel() for i in members]
            parts.append(jax.device_put(np.concatenate(flat), device))
        shape = (sum(math.prod(self._shapes[i]) for i in members),)
        return jax.make_array_from_single_device_arrays(shape, self._sharding, parts)

    def taken_apart(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The values, on the devices. The arrays stay."""
        return self._taken_apart(arrays)


class RaveledValues(Sequence[Any]):
    """Values that lie in one array of each dtype, until they are looked at.

    Args:
        raveling: How they lie in them.
        arrays: The arrays.
    """

    def __init__(self, raveling: Raveling, arrays: list[jax.Array]) -> None:
        self.raveling = raveling
        self.arrays = arrays
        self._values: list[jax.Array] | None = None

    def _each(self) -> list[jax.Array]:
        if self._values is None:
            self._values = self.raveling.taken_apart(self.arrays)
        return self._values

    def __len__(self) -> int:
        return self.raveling.num_values

    @overload
    def __getitem__(self, index: int) -> jax.Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[jax.Array]: ...
    def __getitem__(self, index: int | slice) -> jax.Array | list[jax.Array]:
        return self._each()[index]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self._each())


def _by_device(value: Any, sharding: NamedSharding) -> dict[Any, Any]:
    """Each device's own copy of a value: if they differ, they go on to do so."""
    if isinstance(value, jax.Array) and value.sharding.num_devices > 1:
        return {shard.device: shard.data for shard in value.addressable_shards}
    return dict.fromkeys(sharding.addressable_devices, value)
