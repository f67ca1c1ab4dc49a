"""Convolutions on CPUs as matrix products, where XLA's own are slow."""

from replicax.cpu_convolutions.lowering import Mode, install, using

__all__ = ["Mode", "install", "using"]
