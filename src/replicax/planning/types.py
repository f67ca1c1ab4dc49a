"""What a plan is made of: memory, collectives, points of a scaling curve."""

import dataclasses

__all__ = ["CollectiveUse", "Memory", "Scale"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments: Variables and the batch.
        outputs: Results and the new values of variables.
        aliased: Of the outputs, what takes the place of arguments.
        temporaries: What the step needs while it runs.
        code: The program.
        capacity: Of the device; None: shared with others, or not known.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    capacity: int | None

    @property
    def peak(self) -> int:
        """All of it, while the step runs."""
        held = self.arguments + self.outputs - self.aliased
        return held + self.temporaries + self.code


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveUse:
    """Collectives of a step that are alike.

    Attributes:
        kind: XLA's name, such as `"all-reduce"`.
        dtype: XLA's name of the element type.
        count: How many of them a step makes.
        bytes: Payload of one, on one device.
        group_size: Number of devices that take part together.
        num_groups: Number of such groups, at the same time.
        spans_hosts: Whether a group's devices are on several machines.
        num_slices: Number of slices that a group's devices are in.
        is_async: Whether the device computes meanwhile.
        seconds: Of all of them; None: no rates are known.
    """

    kind: str
    dtype: str
    count: float
    bytes: int
    group_size: int
    num_groups: int
    spans_hosts: bool
    num_slices: int
    is_async: bool
    seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How efficient a step is on some number of devices.

    Attributes:
        num_devices: The number.
        hardware: What they are, such as `"4x4"` chips of a slice.
        efficiency: The time of a step on one device by that on so many, with the same
            batch per device: in (0, 1].
    """

    num_devices: int
    hardware: str
    efficiency: float
