"""The engine: a replica function becomes one XLA program.

`program` is the entry point: it discovers the Keras variables that a function uses,
compiles one program and writes the new values back. `Optimizer.apply` lets the replica
context combine the gradients before the update. At the end of a step, `step_variables`
combines the replicas' values of each variable.

At the start of a step, each replica offsets every seed by a multiple of its index; the
end of the step restores the seed. So replicas draw different random numbers, while the
variables of the seeds stay mirrored.
"""
