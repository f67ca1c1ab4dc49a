"""Checkpoints: saving objects, and restoring them."""

from replicax.checkpoint.checkpoint import Checkpoint, RestoreStatus
from replicax.checkpoint.manager import CheckpointManager, latest_checkpoint
from replicax.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "RestoreStatus",
    "latest_checkpoint",
]
