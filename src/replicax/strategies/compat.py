"""tf.distribute's older spellings: other names of what is here, and nothing else."""

from collections.abc import Callable
from typing import Any

from replicax.strategies.strategy import Strategy

__all__ = ["install"]

_METHODS = {
    "experimental_run_v2": "run",
    "make_experimental_numpy_dataset": "experimental_make_numpy_dataset",
}
"""Methods of `Strategy`: old name to today's."""


def install() -> None:
    """Give `Strategy` its methods' old names as well."""
    for old, new in _METHODS.items():
        setattr(Strategy, old, _forward(old, new))


def _forward(old: str, new: str) -> Callable[..., Any]:
    def method(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, new)(
            *args, **kwargs
        )  # That of the subclass, if it has one.

    method.__name__ = old
    method.__qualname__ = f"{Strategy.__qualname__}.{old}"
    method.__doc__ = f"Old name of `{new}`."
    return method
