"""Commands of the command line, one module each.

A command parses its options and prints results; the work is done in the folder of its
subject, which is imported when the command is called. Nothing imports a command but
`replicax.cli`.
"""
