"""Formats names for messages: at most ten, and the number of the rest."""

from collections.abc import Iterable

__all__ = ["listed"]

_MOST = 10


def listed(
    names: Iterable[str],
    *,
    nobody: str = "nobody",
) -> str:
    """Format names for a sentence; `nobody` is the result for no names.

    Example:
        >>> listed(["worker:1", "worker:2"]), listed([])
        ('worker:1 and worker:2', 'nobody')
        >>> listed(f"worker:{i}" for i in range(500))[-41:]
        'worker:7, worker:8, worker:9 and 490 more'
    """
    names = list(names)
    shown, rest = names[:_MOST], len(names) - _MOST
    if rest > 0:
        return f"{', '.join(shown)} and {rest} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or nobody
