"""The strategies: where replicas run, and what a user calls. One file each.

A strategy is devices, the way gradients travel, and the place where variables live. The
engine does the rest.
"""
