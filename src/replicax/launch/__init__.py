"""Launching: starts, watches and restarts the processes of a job; manifests.

Tasks learn of each other by `TF_CONFIG`. Workers that train in step are restarted all
together, since a synchronous step needs every one; tasks around parameter servers are
restarted one by one. `launcher.launch` starts the tasks (`processes`) and runs the one
loop over them (`supervisor`), which asks `job` what follows an exit. This folder knows
processes, exit statuses and the servers' board, and nothing of what the processes
compute.
"""
