"""Exceptions of replicax. Each is also the nearest builtin exception."""

__all__ = ["ContextError", "DeviceError", "DivergenceError", "InternalError"]


class ContextError(RuntimeError):
    """A call was made in the wrong place: inside or outside a scope or a replica."""


class DeviceError(ValueError):
    """A device is unknown, named twice, or not there."""


class DivergenceError(ValueError):
    """A variable that must be equal on all replicas would not be."""


class InternalError(RuntimeError):
    """A bug in replicax. Please report it with the message and a short script."""
