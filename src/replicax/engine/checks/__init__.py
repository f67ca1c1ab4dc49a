"""Checks for mistakes in programs, replicas and workers that raise no error."""
