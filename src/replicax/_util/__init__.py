"""Utilities for all folders, such as files and waiting; they import no folder."""
