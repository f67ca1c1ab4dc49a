"""How fast a device is: what the time model divides by."""

import dataclasses

__all__ = ["Rates"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Figures of one device, while all the others are busy too.

    Attributes:
        peak_flops: Multiplications and additions per second.
        memory_bytes: Capacity of its memory; None: not its own, or not known.
        memory_bandwidth: Bytes per second.
        ring_bandwidth: Bytes per second that it sends in a ring of all devices, as
            measured; None: computed from the links of a slice.
        source: Where the figures are from.
    """

    peak_flops: float
    memory_bytes: int | None
    memory_bandwidth: float
    ring_bandwidth: float | None
    source: str
