"""Optimizes programs for CPUs that replicax compiles: lowering rules, compiler options.

A program for CPUs is one call of a replicax primitive. This folder's rules lower the
convolutions, pooling, contractions and sums in that call; all other programs keep JAX's
rules. Programs allocate intermediate arrays in pieces that malloc keeps for reuse.

`REPLICAX_CPU=tuned` also tunes malloc and threads of the process; `REPLICAX_CPU=off`
leaves everything to XLA (`settings`). Nothing happens on import.
"""
