"""The token of a cluster with parameter servers that runs on this machine."""

from collections.abc import Mapping

from replicax.ps.credentials import TOKEN, TOKEN_FILE, new_token

__all__ = ["ps_token"]


def ps_token(
    num_tasks: Mapping[str, int], environment: Mapping[str, str]
) -> dict[str, str]:
    """The variable that all tasks need to be let in by the servers, if they have none.

    Args:
        num_tasks: Number of tasks by job.
        environment: The tasks' other variables.

    Example:
        >>> ps_token({"worker": 2}, {})
        {}
        >>> list(ps_token({"worker": 2, "ps": 1}, {}))
        ['REPLICAX_PS_TOKEN']
        >>> ps_token({"worker": 2, "ps": 1}, {"REPLICAX_PS_TOKEN": "a-secret-of-mine"})
        {}
    """
    if not num_tasks.get("ps") or environment.get(TOKEN) or environment.get(TOKEN_FILE):
        return {}
    return {TOKEN: new_token()}
