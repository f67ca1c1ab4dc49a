"""The strategies: the placement of replicas, and the API of users. One file each.

A strategy consists of devices, options of communication, a home (`home`: the placement
of variables, and who makes their updates) and a runner (`runner`: finds and dispatches
compiled programs). The engine does the rest.

This folder knows nothing of models: `keras/`, which it installs, is below it and knows
a strategy by the protocols of the engine.
"""
