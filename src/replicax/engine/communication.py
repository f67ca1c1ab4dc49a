"""How gradients travel between replicas: the choices that a user has."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["CollectiveCommunication", "CommunicationOptions"]

_COMPRESSIONS = (None, "bfloat16")


class CollectiveCommunication(enum.Enum):
    """What carries the collectives between workers.

    (TF: `tf.distribute.experimental.CommunicationImplementation`, before
    `CollectiveCommunication`.)

    Attributes:
        AUTO: What XLA has for the devices: NCCL for GPUs, ICI for TPUs, Gloo for CPUs.
        RING: The same as AUTO; on CPUs that is Gloo's ring.
        NCCL: NCCL, or an error where there are no GPUs.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """How gradients travel between replicas and workers.

    (TF: `tf.distribute.experimental.CommunicationOptions`.)

    Args:
        bytes_per_pack: Gradients are summed in packs of at most this many bytes, the
            last layers' first, as the backward pass finishes them. A larger gradient is
            a pack of its own. 0: XLA decides.
        timeout_seconds: How long a step may wait for a worker, as `step` of the
            strategy's `timeouts`, in whose place it is; None: as given there.
        implementation: What carries the collectives.
        compression: `"bfloat16"`: float32 and float64 gradients travel, and are summed,
            as bfloat16, which has 8 significant bits and float32's range. The sum over
            R replicas is off by at most about `R / 256` of the sum of magnitudes.
            (float16 is not offered: a sum beyond 65504 would be infinite.) None: as
            they are.
        gradient_hook: Called in the replica program, before the sum, with the list of
            this replica's gradients, None for a variable without; returns a list of the
            same length, shapes and dtypes. It is traced, so it may use any JAX.

    Raises:
        ValueError: For a value that is not described above.
        TypeError: For a `gradient_hook` that cannot be called.

    Example:
        >>> options = CommunicationOptions(bytes_per_pack=2**25, timeout_seconds=60)
        >>> options.implementation
        <CollectiveCommunication.AUTO: 'AUTO'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CollectiveCommunication = CollectiveCommunication.AUTO
    compression: str | None = None
    gradient_hook: Callable[[list[Any]], Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        if type(self.bytes_per_pack) is not int or self.bytes_per_pack < 0:
            raise ValueError(
                "CommunicationOptions: bytes_per_pack must be a number of bytes, 0 or "
                f"more, as an integer; got {self.bytes_per_pack!r}. 0 leaves packing "
                "to XLA."
            )
        if type(self.implementation) is not CollectiveCommunication:
            raise ValueError(
                "CommunicationOptions: implementation must be one of rx.experimental."
                f"CollectiveCommunication.AUTO, RING and NCCL; got "
                f"{self.implementation!r}."
            )
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(
                "CommunicationOptions: timeout_seconds must be positive or None; got "
                f"{self.timeout_seconds!r}."
            )
        if self.compression not in _COMPRESSIONS:
            raise ValueError(
                "CommunicationOptions: compression must be 'bfloat16' or None; got "
                f"{self.compression!r}."
            )
        if self.gradient_hook is not None and not callable(self.gradient_hook):
            raise TypeError(
                "CommunicationOptions: gradient_hook must be a function that takes a "
                f"list of gradients and returns one, or None; got "
                f"{self.gradient_hook!r}."
            )
