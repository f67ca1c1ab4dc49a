"""What makes XLA fast on CPUs, for programs that replicax compiles and no others.

A program for CPUs is one call of a primitive of our own. Its rule lowers what is in it
with some rules of this folder in place of JAX's (convolutions, pooling, contractions,
sums), through `override_lowering_rules`; JAX's own rules stay as they are. In a
process that computes on CPUs malloc keeps large arrays in huge pages, programs take
their intermediate arrays in pieces that fit a thread's heap, and Gloo's thread waits
for those that compute.

Nothing of it happens on import, and nothing at all with `REPLICAX_CPU=off`. Two things
have to come before JAX starts its devices, so they come when a strategy first asks for
those or `set_logical_devices` is called: one heap where there is one core, and loops
that are not unrolled. Of JAX's tables one flag changes, with the first program for CPUs
that has such sums: gradients are added in line, by JAX's own rule, in all programs.
"""
