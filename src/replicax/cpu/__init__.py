"""What makes XLA fast on CPUs, for programs that replicax compiles and no others.

A program for CPUs is one call of a primitive of our own. Its rule lowers what is in it
with some rules of this folder in place of JAX's (convolutions, pooling, contractions,
sums), through `override_lowering_rules`; JAX's own tables stay as they are. In a
process that computes on CPUs malloc keeps large arrays in huge pages, programs take
their intermediate arrays in pieces that fit a thread's heap, and Gloo's thread waits
for those that compute. Nothing of it happens before a strategy has CPU devices, and
nothing at all with `REPLICAX_CPU=off`.
"""
