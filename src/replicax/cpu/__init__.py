"""What JAX lowers for CPUs, where XLA is slow with it: convolutions and others."""

from replicax.cpu.lowering import apply

__all__ = ["apply"]
