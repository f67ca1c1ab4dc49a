"""Convolutions on CPUs as matrix products, where XLA's own are slow."""

from replicax.cpu_convolutions.lowering import Mode, install, install_if_asked, using

__all__ = ["Mode", "install", "install_if_asked", "using"]
