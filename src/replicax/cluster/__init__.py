"""Clusters: their description, processes, agreement and end."""
