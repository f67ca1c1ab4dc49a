"""The strategies: the placement of replicas, and the API of users. One file each.

A strategy consists of devices, options of communication, a home (`home` places and
updates variables) and a runner (`runner` finds and dispatches compiled programs). The
engine does the rest.

This folder imports no models. It installs the hooks of `keras/`, the layer below, which
knows a strategy only by the engine's protocols.
"""
