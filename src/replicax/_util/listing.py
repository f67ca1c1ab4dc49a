"""Names in messages: at most ten, and the number of the rest."""

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
    """Names for a sentence.

    Args:
        names: In the order in which to give them.
        nobody: What stands for no name.
        separator: What stands between names.
        last: What stands before the last name, and before the number of the rest.
        most: How many are named.

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
