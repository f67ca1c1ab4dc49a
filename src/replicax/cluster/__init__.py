"""Clusters: membership, rendezvous, failure detection and coordinated shutdown.

Each process runs the same script; one mesh spans all their devices, so a step is one
program with collectives across machines, carried by NCCL, ICI or Gloo. This folder
knows processes and addresses, and nothing of models, variables or programs.

Coordination service. JAX's own, in a small process beside worker 0. Inside worker 0 the
service would die with it, and JAX aborts every process that loses the service. Workers
exchange small values through its key-value store, about 0.3 ms a call, never between
two steps of a loop.

Detection. `environments` has one class for each launcher; `detection` chooses the
innermost launcher that is there, and raises an error if two contradict each other.

Rendezvous. All processes meet at the address of process 0, which names the absent ones
(`rendezvous`). Where a launcher gives this address only, process 0 also collects the
addresses of the others.

Order check. A worker logs each operation that all workers must do in the same order:
programs, sums, batches, saves, calls of a model. A step pays for one append to a list.
Heartbeats carry rolling checksums of the logs; where they differ, all workers end and
report the first difference.

Failure detection. One thread sends heartbeats with this worker's progress and receives
those of the others; another thread watches the deadlines. A pure function, without
clock or I/O, decides who died, hangs, left early or raised. A process inside a
collective cannot be interrupted, so the thread ends it, with a message, a report for
the launcher, and an exit status.

Stopping together. A worker must not wait for others between steps, since their step may
need this worker. So the heartbeat threads agree on the step after which all stop.
"""
