"""Keras callbacks of replicax."""

from replicax.report.callback import Report

__all__ = ["Report"]
