"""The shardings of variables: replicated on each device, or sharded.

Between steps, replicas of data parallel training can hold a block each of the optimizer
state (ZeRO) or of all weights (FSDP). A model parallel strategy splits weights over
devices that work on the same replica. "Slots" are an optimizer's state of one weight.
"""

import dataclasses
import math
from collections.abc import Callable

from jax.sharding import PartitionSpec

from replicax._private import keras as internals
from replicax.engine.variables import Variable

__all__ = ["FEWEST_ELEMENTS", "Layouts", "ModelSplit"]

FEWEST_ELEMENTS = 1024
"""Smaller variables are not split: communicating their blocks would cost more."""

# Variables of other aggregations are combined from whole values of the replicas.
_SPLIT_AGGREGATIONS = ("none", "only_first_replica")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSplit:
    """The sharding of one replica's weights over several devices.

    Attributes:
        num_devices: Number of devices that work on one replica.
        axis_name: Their mesh axis.
        spec: Gives the `PartitionSpec` of a weight of this path and shape.
    """

    num_devices: int
    axis_name: str
    spec: Callable[[str, tuple[int, ...]], PartitionSpec]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layouts:
    """The rule that gives every variable its `PartitionSpec`.

    Attributes:
        axis_name: The replicas' mesh axis.
        num_devices: Its size.
        split_slots: Whether replicas hold blocks of the optimizer's slots, and divide
            its updates.
        split_weights: Whether they hold blocks of weights, too.
        of_path: Gives the `PartitionSpec` over other mesh axes of a weight of this path
            and shape; None: no weight is split over others.
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
        """The sharding of an optimizer's slot; `path` is its weight's, or `""`."""
        return self._spec(path, shape, aggregation, self.split_slots)

    def dim_of(self, variable: Variable) -> int | None:
        """The dimension along which replicas hold blocks between steps, if any."""
        return self.dim_in(self.of(variable))

    def dim_of_update(self, variable: Variable) -> int | None:
        """The dimension along which replicas divide a weight's update, if any.

        The weight's slots are split along the same dimension.
        """
        return self.dim_in(
            self.of_slot(variable.path, tuple(variable.shape), variable.aggregation)
        )

    def dim_in(self, spec: PartitionSpec) -> int | None:
        """The dimension that a layout splits over the replicas, if any."""
        for dim, names in enumerate(spec):
            if names == self.axis_name:
                return dim
        return None

    def _spec(
        self, path: str, shape: tuple[int, ...], aggregation: str, is_split: bool
    ) -> PartitionSpec:
        spec = PartitionSpec() if self.of_path is None else self.of_path(path, shape)
        names = [*spec, *(None for _ in shape[len(spec) :])]
        free = [
            dim
            for dim, size in enumerate(shape)
            if names[dim] is None and size % self.num_devices == 0
        ]
        can_split = (
            aggregation in _SPLIT_AGGREGATIONS and math.prod(shape) >= FEWEST_ELEMENTS
        )
        if not (is_split and can_split and free) or self.num_devices == 1:
            return spec
        # The largest dimension that can be split over the replicas.
        names[max(free, key=lambda dim: shape[dim])] = self.axis_name
        return PartitionSpec(*names)
