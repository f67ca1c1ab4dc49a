"""Parameter servers: variables that live in other processes.

Workers run the engine's program with deferred updates and do not join each other: each
is a client of the servers alone, so one that dies takes no other with it.

Where what runs:

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

Shards. What one `optimizer.apply` trains is a group; its variables are cut into shards,
balanced over the servers by bytes. In a server, and on the wire, a group is one flat
vector per dtype. A server rebuilds the user's optimizer from its config and steps it
with one compiled function. Vectors that were handed out never change, so answering
needs no copy. Pushes carry a session and a sequence number, and are applied exactly
once.

Asynchronous steps. A push is answered with the newest values, from which the next step
begins; with `overlap=True` that begins before. Staleness counts the updates between the
values that a gradient is of and its own.

One push. `server_home` runs the program on the values that it has of each group.
`training_steps` hands the gradients to the group (`remote`), which has `group_vectors`
cut them for each server and a `connection` send each a message of `messages`, in the
form of `wire`. `service` checks it there and finds its group in the `store`; `groups`
applies it once: a `dense_group` by its `server_optimizer`, a `table` by its
`row_optimizer`. The answer brings the new values.

One pull. `RemoteGroup.pull` asks each server by a `Pull` with the version that it has.
A server answers with its vectors, if they are newer; `group_vectors` makes the
variables' values of them.

One closure. `coordinator` has `closure_calls` pack its arguments as `payloads`; a
`session` calls the `board`, where `closures` queues it. A worker's `closure_calls`
takes it, runs it, and sends its outcome the same way. `ScriptSync` keeps the scripts
of all tasks in step.

The board. Server 0 keeps heartbeats, the work queue, barriers and closures: a state
machine without clock or threads. Each of its actions is a method where its state is
(`presence`, `streams`, `closures`), whose annotations are also the limits of a call.
Who waits asks again, so every wait has its deadline where it waits.

`fit`. All workers go through the data in the same order, and train on the batches that
they have a ticket for (`worker_input`). Each batch is trained on once, by whichever
worker was free. At the end of an epoch all meet: metrics are summed, and the chief says
whether to go on.

Large embeddings. The rows of `rx.layers.Embedding` come into the program, and their
gradients out of it, through callbacks, and travel beside the dense groups.
"""
