"""The strategies: where replicas run, and what a user calls. One file each.

A strategy is devices, the way gradients travel, a home (`home`: where variables live,
and who makes their updates) and a runner (`runner`: programs on their way to the
devices). The engine does the rest.
"""
