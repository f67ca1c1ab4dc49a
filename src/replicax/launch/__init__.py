"""Launching: starts, supervises and restarts the processes of a job; manifests.

Tasks find each other by `TF_CONFIG`. Synchronous workers are restarted together, since
a step needs all of them; tasks of a job with parameter servers are restarted one by
one. `launcher.launch` starts the tasks (`processes`) and runs the supervision loop
(`supervisor`), in which `job` decides about restarts. This folder handles processes,
exit statuses and the servers' token, but not what the processes compute.
"""
