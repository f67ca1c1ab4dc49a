"""Runs Keras' models on a strategy.

Only this folder and `_private` touch Keras' internals.

Keras' train, test and predict steps are replica functions of the engine. Code
outside replica functions, and models without a strategy, run as in plain Keras.

Loss denominators. A Keras loss divides by a count: examples, unmasked steps, sample
weights. Inside a replica function the count covers all replicas, so that each replica
holds its share of the global mean. Results, metrics and gradients equal one device's.

Ragged batches. A batch that does not divide goes to the largest number of replicas that
divides it; the others get copies, and every sum over replicas leaves them out. No row
is padded, so batch normalisation sees real rows only.

Tiny models. Calling a step of a few microseconds takes longer than its computation. So
batches stay ranges of rows, and all batches of an execution are sliced at once. Threads
that read each batch's logs are started only where a callback asks for them.
"""
