"""Commands of the command line, one module each.

A command parses its options and prints results; the folder of its subject does the
work, and the command imports that folder when it is called. Only `replicax.cli` imports
commands.
"""
