"""Clusters: membership, rendezvous, failure detection and coordinated shutdown.

Each process runs the same script, and one mesh spans all their devices. This folder
knows processes and addresses, and nothing of models, variables or programs. In order:
`detection` reads the launcher's variables; `joining` meets the other workers
(`rendezvous`) and connects them through JAX's `coordination_service`; `workers`
exchanges small values; `watch` sends heartbeats, which the `failure_detector` judges
and the order check of `dispatch_log` compares; `stopping` ends all at the same step.
"""
