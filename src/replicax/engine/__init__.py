"""The engine: a replica function becomes one XLA program.

`program` is the entry: it discovers the Keras variables that a function uses, compiles
one program and writes the new values back. At its end, a step combines each variable's
values over the replicas: `step_variables`. `Optimizer.apply` first passes the gradients
to the replica context, which combines them.

The replica's index is added to each seed at the start of a step and removed at its end,
so random numbers differ between replicas and the variables stay mirrored.
"""
