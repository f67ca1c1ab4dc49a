"""Checks of programs, replicas and workers for what would be wrong in silence."""
