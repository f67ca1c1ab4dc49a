"""The engine: a replica function becomes one XLA program.

`program` is the entry: it discovers a function's variables, compiles one program and
writes the variables back. The engine uses Keras' variables and scopes, but no models or
data.

At the start of a step, each variable of aggregation `"sum"`, such as a metric's, is
split into one summand per replica, and the summands are added at the end. So a step may
add to, reset, read or decay its summand. All summands but the first are rounded to
fewer bits, so that their sum is exact.

`Optimizer.apply` first passes the gradients to the replica context, which sums them
over the replicas in `run` and averages them in `fit`.

Updates that replicas divide (ZeRO) follow the replicas' part of the program, and XLA's
partitioner divides them. If a step uses the new values itself, as a GAN's does, each
device makes the whole update inside the step.

A step adds the replica's index to each seed generator's seed at the start, and restores
the seed at the end, so masks differ between replicas and the state stays mirrored.
"""
