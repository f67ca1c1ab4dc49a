"""Checkpoints: saves and restores state, atomically and with checksums.

Each worker copies its shards to the host, and writes them in a thread, without
collectives. Mirrored variables are equal on all workers: the chief, worker 0, writes
them. The workers fill a temporary folder. The chief writes the manifest with checksums
last, calls fsync and renames the folder. So a folder with its final name is complete,
and a read detects damage.
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
