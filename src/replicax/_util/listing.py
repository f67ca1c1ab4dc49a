"""Names of tasks in messages: at most ten, and the number of the rest."""

from collections.abc import Iterable

__all__ = ["listed"]

_MOST = 10


def listed(names: Iterable[str], *, nobody: str = "nobody", last: str = " and ") -> str:
    """Names for a sentence.

    Args:
        names: In the order in which to give them.
        nobody: What stands for no name.
        last: What stands before the last name.

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
    return last.join(filter(None, [", ".join(shown[:-1]), *shown[-1:]])) or nobody
