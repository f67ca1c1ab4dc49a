"""Optimizes programs for CPUs that replicax compiles: lowering rules, memory, threads.

A program for CPUs is one call of a replicax primitive. The primitive's rule lowers the
operations in the call with rules of this folder in place of JAX's (convolutions,
pooling, contractions, sums), through `override_lowering_rules`; JAX's own rules stay as
they are. In a process that computes on CPUs, malloc keeps large arrays in huge pages,
programs allocate intermediate arrays in pieces that fit a thread's heap, and Gloo's
thread yields to computing threads.

Nothing happens on import, and nothing at all with `REPLICAX_CPU=off`. Two settings must
precede the start of JAX's devices: a single heap on one core, and loops that are not
unrolled. They are made when a strategy first asks for devices, or by
`set_logical_devices`. The first program for CPUs with long sums changes one flag in
JAX's tables: gradients are added in line, by JAX's own rule, in all programs.
"""
