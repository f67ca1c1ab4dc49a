"""Optimizes programs for CPUs that replicax compiles: lowering rules, compiler options.

A program for CPUs is one call of a replicax primitive. The primitive's rule lowers the
operations in the call with rules of this folder in place of JAX's (convolutions,
pooling, contractions, sums), through `override_lowering_rules`; JAX's own rules stay as
they are. Programs allocate intermediate arrays in pieces that fit a thread's heap.

`REPLICAX_CPU=tuned` also tunes the process: malloc keeps large arrays in huge pages,
one core has one heap, and Gloo's thread yields to computing threads.
`REPLICAX_CPU=off` leaves everything to XLA.

Nothing happens on import. `set_logical_devices` sets the XLA flag that keeps loops as
they are, because XLA reads it when JAX starts its devices. The first program for CPUs
with long sums changes one flag in JAX's tables: JAX's own rule adds gradients in line,
in all programs.
"""
