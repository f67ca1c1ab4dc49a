"""Optimizes programs for CPUs that replicax compiles: lowering rules, compiler options.

A program for CPUs is one call of a replicax primitive. The primitive's rule lowers the
operations in the call with rules of this folder in place of JAX's (convolutions,
pooling, contractions, sums), through `override_lowering_rules`; JAX's own rules stay as
they are. Programs allocate intermediate arrays in pieces that malloc keeps for reuse.

`REPLICAX_CPU=tuned` also tunes the process: malloc keeps large arrays in huge pages,
with one core all threads share a heap, and Gloo's thread yields to computing threads.
`REPLICAX_CPU=off` leaves everything to XLA.

Nothing happens on import. `set_logical_devices` sets the XLA flag against unrolling
loops, because XLA reads it when JAX starts its devices. The first program for CPUs
changes one flag in JAX's tables: in all programs, JAX's rule for sums of gradients then
writes each sum in line, not as a call of a shared function.
"""
