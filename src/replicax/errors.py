"""Exceptions of replicax. Each is also the nearest builtin exception."""

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "ClusterConfigError",
    "ClusterError",
    "ClusterMismatchError",
    "ContextError",
    "DeviceError",
    "DivergenceError",
    "InputError",
    "InternalError",
    "LostValuesError",
]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit."""


class ClusterConfigError(ValueError):
    """The description of a cluster, such as `TF_CONFIG`, is malformed or incomplete.

    Attributes:
        problems: Everything that is wrong with it, one sentence each.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ClusterError(RuntimeError):
    """The workers of a cluster cannot go on together: one is missing or lost.

    The process exits with a retryable code if nobody catches it.

    Attributes:
        culprit: The task that others waited for, such as `"worker:1"`, if it is alive.
    """

    def __init__(self, message: str, culprit: str | None = None) -> None:
        super().__init__(message)
        self.culprit = culprit


class ClusterMismatchError(ClusterError):
    """The workers of a cluster do not run the same program. Permanent."""


class ContextError(RuntimeError):
    """A call was made in the wrong place: inside or outside a scope or a replica."""


class DeviceError(ValueError):
    """A device is unknown, named twice, or not there."""


class DivergenceError(ValueError):
    """A variable that must be equal on all replicas would not be."""


class InputError(ValueError):
    """The datasets of a cluster's workers do not go together."""


class InternalError(RuntimeError):
    """A bug in replicax. Please report it with the message and a short script."""


class LostValuesError(RuntimeError):
    """Arrays that are needed have been deleted: their memory was given away."""
