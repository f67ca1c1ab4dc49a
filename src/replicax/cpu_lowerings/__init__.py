"""What JAX lowers for CPUs, where XLA is slow with it: convolutions and others."""

from replicax.cpu_lowerings.lowering import Mode, install, using

__all__ = ["Mode", "install", "using"]
