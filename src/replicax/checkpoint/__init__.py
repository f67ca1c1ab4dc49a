"""Checkpoints: state out, complete or absent.

Variables are equal on all workers, so worker 0 alone copies them to the host and
writes, in a thread; no collective is involved. A manifest of checksums is written last
and the folder renamed then: what has its final name is complete, and damage is found on
reading.
"""

from replicax.checkpoint.checkpoint import Checkpoint
from replicax.checkpoint.manager import CheckpointManager, latest_checkpoint
from replicax.checkpoint.restore import RestoreStatus
from replicax.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "RestoreStatus",
    "latest_checkpoint",
]
