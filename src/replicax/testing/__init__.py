"""Runs functions and scripts as the tasks of a cluster on this machine, in tests.

`run` does it in one call; with `Cluster` a test can read the output while it runs, and
kill or freeze tasks.
"""

from replicax.testing.cluster import Cluster, run
from replicax.testing.results import ClusterTimeout, Results, TaskFailed, TaskResult

__all__ = ["Cluster", "ClusterTimeout", "Results", "TaskFailed", "TaskResult", "run"]
