"""Clusters: which processes there are, how they meet, and how they fail together.

Each process runs the same script; one mesh spans all their devices, so a step is one
program with collectives across machines, carried by NCCL, ICI or Gloo. This folder
knows processes and addresses, and nothing of models, variables or programs.

Coordination service. JAX's own, in a small process beside worker 0: inside it, the
service would die with worker 0, and JAX aborts every process that loses it. Workers
exchange small values through its key-value store, about 0.3 ms a call, never between
two steps of a loop.

Start-up. While it waits for the others a worker holds its own port open, so that each
can name those that are absent.

Same order. A worker logs what all must do in the same order: programs, sums, batches,
saves, calls of a model. A step pays for one append to a list. Checksums of the logs
travel with the heartbeats; where they differ, all workers end with the first
difference.

Failure detection. Two threads: one sends heartbeats with this worker's progress and
receives those of the others; one looks at the clock. A function without clock or I/O
judges who died, hangs, left early or raised. A process inside a collective cannot be
interrupted, so the thread ends it, with a message, a report for the launcher, and an
exit status.

Stopping together. A worker must not wait for others between steps, which may need it to
finish theirs. So the watch threads agree on the step after which all stop.
"""
