"""The engine: a replica function becomes one XLA program.

Here are the trace of a replica function, what is found out about it, gradients and
their sums, and where variables lie on the devices. `program` is the way through. The
engine knows Keras by its variables and scopes, and nothing of models, data or
strategies.
"""
