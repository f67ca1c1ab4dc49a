"""Launching: starts, watches and restarts the processes of a job; manifests.

It knows processes, exit statuses and the board of parameter servers, and nothing of
what the processes compute.
"""
