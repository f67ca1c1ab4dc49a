"""Exceptions of replicax, each a subclass of the nearest builtin exception."""

from collections.abc import Iterator
from contextlib import contextmanager

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
    "names_distribution",
]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit."""


class ClusterConfigError(ValueError):
    """The description of a cluster, such as `TF_CONFIG`, is malformed or incomplete.

    Attributes:
        problem: The first problem of the description, in one sentence.
    """

    def __init__(self, message: str, problem: str = "") -> None:
        super().__init__(message)
        self.problem = problem


class ClusterError(RuntimeError):
    """The workers of a cluster cannot continue: one of them is missing or lost.

    If it is not caught, the process exits with a retryable code.

    Attributes:
        culprit: The live task that others wait for, such as `"worker:1"`, or None.
    """

    def __init__(self, message: str, culprit: str | None = None) -> None:
        super().__init__(message)
        self.culprit = culprit


class ClusterMismatchError(ClusterError):
    """The workers of a cluster do not run the same program. Permanent."""


class ContextError(RuntimeError):
    """A call was made in the wrong place: inside or outside a scope or a replica."""


class DeviceError(ValueError):
    """A device is unknown, named twice, or absent."""


class DivergenceError(ValueError):
    """A variable that must be equal on all replicas would differ."""


class InputError(ValueError):
    """An input file is damaged, or the datasets of a cluster's workers differ."""


class InternalError(RuntimeError):
    """A bug in replicax. Please report it with the message and a short script."""


class LostValuesError(RuntimeError):
    """A variable or argument has no value any more: its memory was donated."""


@contextmanager
def names_distribution(name: str) -> Iterator[None]:
    """A context for the import of a distribution, such as `"replicax-estimator"`.

    Raises:
        ModuleNotFoundError: If the distribution is not installed. The message has the
            command that installs it.
    """
    package = name.replace("-", "_")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"{package} is not installed. Install its distribution {name}: "
            f"pip install {name} (from a checkout: pip install "
            f"./packages/{name.removeprefix('replicax-')})",
            name=package,
        ) from None
