"""Cluster environments: the processes that train together, one class per launcher.

`base` has the base class, `ClusterEnvironment`; the other modules have one class for
each launcher. `replicax.cluster.detection` chooses among them.
"""
