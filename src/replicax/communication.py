"""How workers communicate: the choice that a user has."""

import dataclasses
import enum

__all__ = ["CollectiveCommunication", "CommunicationOptions"]


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
    """How workers communicate.

    (TF: `tf.distribute.experimental.CommunicationOptions`.)

    Attributes:
        implementation: What carries the collectives.
        timeout_seconds: How long a step may wait for a worker; None: the strategy's
            `step_timeout_seconds`.

    Raises:
        ValueError: For an unknown implementation or a timeout that is not positive.

    Example:
        >>> CommunicationOptions(timeout_seconds=60).implementation
        <CollectiveCommunication.AUTO: 'AUTO'>
    """

    implementation: CollectiveCommunication = CollectiveCommunication.AUTO
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.implementation, CollectiveCommunication):
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
