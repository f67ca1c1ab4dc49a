"""What goes wrong with checkpoints."""

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit the objects."""
