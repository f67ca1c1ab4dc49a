"""Parameter servers: variables that live in other processes, for asynchronous training.

Each worker is a client of the servers and has no connection to other workers, so a dead
worker stops no other worker. The modules, by the process that uses them:

    both sides    wire, messages, message_stream, shared_memory, limits, credentials,
                  partition, group_vectors, optimizers
    a server      serve, service, open_connections, store, groups, snapshots, call_log;
                  variables: dense_group, server_optimizer; tables: table,
                  row_optimizer, row_initializers
    server 0      board: presence, streams, tickets, closures
    a worker      strategy, session, connection, client_stream, server_home, variables,
                  remote, remote_optimizer; tables: rows, embedding; fit, worker_input
    coordinators  coordinator, closure_calls, closure_variables, payloads

A group is the variables that one `optimizer.apply` updates, cut into shards. In a
server, and on the wire, a group is one flat vector per dtype. The server rebuilds the
user's optimizer from its config. Vectors are immutable, so an answer needs no copy.

One push. `server_home` runs the program on the worker's cached values of each group.
`remote` pushes the gradients: `group_vectors` cuts them for each server, and a
`connection` sends each server a message of `messages`, encoded by `wire`. On the
server, `service` checks the message, and `groups` applies the push exactly once: a
`dense_group` by its `server_optimizer`, a `table` by its `row_optimizer`. The answer
has the newest values, which the next step uses. A gradient's staleness is the number of
updates between the values that it was computed from and its own update.

The board. Server 0 keeps heartbeats, work queues, barriers and closures. In `fit`, all
workers read the data in the same order; each trains on the batches that it has claimed
from the work queue. A closure is a function that the chief of a coordinator schedules:
the board queues it, and a free worker claims it, runs it and reports the outcome.
"""
