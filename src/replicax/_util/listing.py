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
    """Format names for a sentence.

    Args:
        names: The names, in order.
        nobody: The result for no names.
        separator: The text between names.
        last: The text before the last name, and before the number of the rest.
        most: Maximal number of names.

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
