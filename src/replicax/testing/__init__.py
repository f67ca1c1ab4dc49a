"""Run functions and scripts as the tasks of a cluster on this machine, in tests.

`run` does it in one call; `Cluster` lets a test read the output meanwhile, and kill or
freeze tasks.
"""

from replicax.testing.cluster import Cluster, run
from replicax.testing.results import ClusterTimeout, Results, TaskFailed, TaskResult

__all__ = ["Cluster", "ClusterTimeout", "Results", "TaskFailed", "TaskResult", "run"]
