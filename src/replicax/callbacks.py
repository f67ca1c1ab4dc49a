"""Keras callbacks of replicax."""

from replicax.keras.chief import on_chief
from replicax.planning.throughput import Throughput
from replicax.report.callback import Report
from replicax.report.tensorboard import TensorBoard

__all__ = ["Report", "TensorBoard", "Throughput", "on_chief"]
