"""Keras callbacks of replicax."""

from replicax.report.callback import Report
from replicax.report.tensorboard import TensorBoard

__all__ = ["Report", "TensorBoard"]
