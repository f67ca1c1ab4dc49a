"""Runs functions and scripts as the tasks of a cluster on this machine, in tests.

`run` waits until all tasks have ended. With a `Cluster`, a test can read the tasks'
output while they run, and kill or freeze tasks.

`calls` serializes the function or script, `cluster` starts the tasks with the processes
of `launch`, `runner` is the script of each task, and `results` has their results. No
other folder imports this one.
"""

from replicax.testing.cluster import Cluster, run
from replicax.testing.results import ClusterTimeout, Results, TaskFailed, TaskResult

__all__ = ["Cluster", "ClusterTimeout", "Results", "TaskFailed", "TaskResult", "run"]
