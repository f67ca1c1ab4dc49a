"""Formats names for messages: the first ones, and the number of the rest."""

from collections.abc import Iterable

__all__ = ["listed"]


def listed(
    names: Iterable[str],
    *,
    nobody: str = "nobody",
    last: str = " and ",
    most: int = 10,
) -> str:
    """Format at most `most` names for a sentence; no names: `nobody`.

    `last` precedes the last name, or the number of the rest.

    Example:
        >>> listed(["worker:1", "worker:2"]), listed([])
        ('worker:1 and worker:2', 'nobody')
        >>> listed(f"worker:{i}" for i in range(500))[-41:]
        'worker:7, worker:8, worker:9 and 490 more'
    """
    names = list(names)
    shown, rest = names[:most], len(names) - most
    if rest > 0:
        return f"{', '.join(shown)}{last}{rest} more"
    return last.join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or nobody
