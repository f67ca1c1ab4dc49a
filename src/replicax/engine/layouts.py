"""The shardings of variables between steps.

With data parallelism, variables are replicated, or each replica holds one block of the
optimizer state (ZeRO), or also of the weights (FSDP). With model parallelism, weights
are split over the devices of one replica. *Slots* are a weight's optimizer state.
"""

import dataclasses
import math
from collections.abc import Callable

from jax.sharding import PartitionSpec

from replicax._private import keras as internals
from replicax.engine.variables import Variable

__all__ = ["FEWEST_ELEMENTS", "Layouts", "ModelSplit"]

FEWEST_ELEMENTS = 1024
"""Variables with fewer elements are not split."""

# With other aggregations, the step combines whole values.
_SPLIT_AGGREGATIONS = ("none", "only_first_replica")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSplit:
    """The sharding of one replica's weights over several devices.

    Attributes:
        num_devices: Number of devices of one replica.
        axis_name: The mesh axis of these devices.
        spec: Maps a weight's path and shape to its `PartitionSpec`.
    """

    num_devices: int
    axis_name: str
    spec: Callable[[str, tuple[int, ...]], PartitionSpec]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
    """The rule that determines every variable's `PartitionSpec`.

    Attributes:
        axis_name: The replicas' mesh axis.
        num_devices: The size of that axis.
        split_slots: Whether replicas hold blocks of slots, and divide the updates.
        split_weights: Whether replicas hold blocks of weights.
        of_path: Maps a weight's path and shape to its `PartitionSpec` over the other
            mesh axes; None: weights are not split over other axes.
    """

    axis_name: str
    num_devices: int
    split_slots: bool = False
    split_weights: bool = False
    of_path: Callable[[str, tuple[int, ...]], PartitionSpec] | None = None

    def of(self, variable: Variable) -> PartitionSpec:
        """The sharding of a Keras variable between steps."""
        shape, aggregation = tuple(variable.shape), variable.aggregation
        reference = internals.reference_of(variable)
        if reference is not None:
            return self.of_slot(reference, shape, aggregation)
        return self._spec(variable.path, shape, aggregation, self.split_weights)

    def of_slot(
        self, path: str, shape: tuple[int, ...], aggregation: str
    ) -> PartitionSpec:
        """The sharding of a slot; `path` is the weight's path, or `""` if unknown."""
        return self._spec(path, shape, aggregation, self.split_slots)

    def of_array(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The sharding of an array of a pytree, by the rule of Keras' weights."""
        return self._spec(path, shape, "none", self.split_weights)

    def dim_of(self, variable: Variable) -> int | None:
        """The dimension along which replicas hold blocks of a variable, if any."""
        return self.dim_in(self.of(variable))

    def dim_of_update(self, variable: Variable) -> int | None:
        """The dimension along which a weight's update and slots are split, if any."""
        return self.dim_in(
            self.of_slot(variable.path, tuple(variable.shape), variable.aggregation)
        )

    def dim_in(self, spec: PartitionSpec) -> int | None:
        """The dimension that a spec splits over the replicas, if any."""
        for dim, names in enumerate(spec):
            if names == self.axis_name:
                return dim
        return None

    def _spec(
        self, path: str, shape: tuple[int, ...], aggregation: str, is_split: bool
    ) -> PartitionSpec:
        spec = PartitionSpec() if self.of_path is None else self.of_path(path, shape)
        axes = [*spec, *(None for _ in shape[len(spec) :])]
        divisible = [
            dim
            for dim, size in enumerate(shape)
            if axes[dim] is None and size % self.num_devices == 0
        ]
        may_split = (
            aggregation in _SPLIT_AGGREGATIONS and math.prod(shape) >= FEWEST_ELEMENTS
        )
        if not (is_split and may_split and divisible) or self.num_devices == 1:
            return spec
        axes[max(divisible, key=lambda dim: shape[dim])] = self.axis_name
        return PartitionSpec(*axes)
