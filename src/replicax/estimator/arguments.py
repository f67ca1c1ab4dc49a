"""Which arguments a user's function wants."""

from collections.abc import Callable, Sequence
from typing import Any

from replicax._util.signatures import named_parameters

__all__ = ["wanted_arguments"]


def wanted_arguments(
    fn: Callable[..., Any], name: str, offered: Sequence[str], given: Sequence[str] = ()
) -> set[str]:
    """Those of the offered arguments that a function has by name.

    Args:
        fn: The function.
        name: What errors call it.
        offered: Arguments that it may have.
        given: Arguments that it gets in any case.

    Raises:
        ValueError: If it needs others.
    """
    parameters = named_parameters(fn).values()
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in (*given, *offered)
    ]
    if needed:
        also = f"{' and '.join(given)} and " if given else ""
        raise ValueError(
            f"Estimator: {name} has the arguments {needed}. It is called with {also}"
            f"those of {list(offered)} that it has."
        )
    return {p.name for p in parameters} & set(offered)
