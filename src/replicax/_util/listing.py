"""Formats names for messages: at most ten, and the number of the rest."""

from collections.abc import Iterable

__all__ = ["listed"]


def listed(
    names: Iterable[str],
    *,
    nobody: str = "nobody",
    separator: str = ", ",
    last: str = " and ",
    most: int = 10,
) -> str:
    """Format at most `most` names for a sentence.

    `last` precedes the last name, or the number of the rest. `nobody` is the result for
    no names.

    Example:
        >>> listed(["worker:1", "worker:2"]), listed([])
        ('worker:1 and worker:2', 'nobody')
        >>> listed(f"worker:{i}" for i in range(500))[-41:]
        'worker:7, worker:8, worker:9 and 490 more'
    """
    names = list(names)
    shown, rest = names[:most], len(names) - most
    if rest > 0:
        return f"{separator.join(shown)}{last}{rest} more"
    return last.join(filter(None, [separator.join(shown[:-1]), *shown[-1:]])) or nobody
