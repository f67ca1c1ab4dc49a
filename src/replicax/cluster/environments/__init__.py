"""Cluster environments: which processes train together, as each launcher says it.

`base` has the seam, `ClusterEnvironment`; the other modules have one class for each
launcher. `replicax.cluster.detection` chooses among them.
"""
