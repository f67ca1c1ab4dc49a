"""`replicax token`: prints a new token for a cluster with parameter servers."""

import typer

from replicax.ps.credentials import new_token

__all__ = ["token"]


def token() -> None:
    """Print a new token for a cluster with parameter servers.

    All tasks of the cluster need the same token: in the variable REPLICAX_PS_TOKEN, or
    in a file that REPLICAX_PS_TOKEN_FILE names and that only its owner may read.
    `replicax run` makes a token for its tasks.
    """
    typer.echo(new_token())
