"""Parameter servers: variables that live in other processes.

Workers run the engine's program with deferred updates. Each worker is a client of the
servers and has no connection to other workers, so a dead worker stops no other worker.

Modules by the process that uses them:

    both sides    wire, messages, message_stream, shared_memory, limits, credentials,
                  partition, group_vectors, optimizers
    a server      serve, service, open_connections, store, groups, snapshots, call_log;
                  variables: dense_group, server_optimizer; tables: table,
                  row_optimizer, row_initializers
    server 0      board: presence, streams, tickets, closures
    a worker      strategy, session, connection, client_stream, server_home,
                  training_steps, variables, remote, remote_optimizer, group_servers;
                  tables: rows, embedding; fit, worker_input
    coordinators  coordinator, closure_calls, closure_variables, payloads

Shards. A group is the variables that one `optimizer.apply` updates. They are cut into
shards, balanced over the servers by bytes. In a server, and on the wire, a group is one
flat vector per dtype. A server rebuilds the user's optimizer from its config and steps
it with one compiled function. Vectors are immutable, so an answer needs no copy. Each
push carries a session and a sequence number; a server applies each push exactly once.

Asynchronous steps. The answer to a push has the newest values, and the next step uses
them; with `overlap=True` the next step begins before the answer. A gradient's staleness
is the number of updates after the values that it was computed from and before its own.

One push. `server_home` runs the program on the worker's cached values of each group.
`training_steps` passes the gradients to the group (`remote`). `group_vectors` cuts them
for each server, and a `connection` sends each server a message of `messages`, encoded
by `wire`. On the server, `service` checks the message and finds its group in the
`store`. `groups` applies the push once: a `dense_group` by its `server_optimizer`, a
`table` by its `row_optimizer`. The answer has the new values.

One pull. `RemoteGroup.pull` sends each server a `Pull` with the cached version. A
server with a newer version answers with its vectors; `group_vectors` turns the vectors
into the variables' values.

One closure. In `coordinator`, `closure_calls` packs the arguments as `payloads`. A
`session` calls the `board`, where `closures` queues the closure. A worker's
`closure_calls` claims and runs it, and sends the outcome to the board. `ScriptSync`
keeps the scripts of all tasks in step.

The board. Server 0 keeps heartbeats, the work queue, barriers and closures: a state
machine without clock or threads. `presence`, `streams` and `closures` each define the
actions on their own state; the annotations of an action are also the limits of a call.
A waiting client polls, so each client enforces its own deadline.

`fit`. All workers read the data in the same order, and train on the batches that they
hold a ticket for (`worker_input`). One worker trains on each batch: the next free one.
At the end of an epoch all workers meet, sum their metrics, and the chief decides
whether to continue.

Large embeddings. Callbacks bring the rows of `rx.layers.Embedding` into the program and
their gradients out of it. Rows are pulled and pushed apart from the dense groups.
"""
