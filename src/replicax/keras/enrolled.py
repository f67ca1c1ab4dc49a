"""Functions of folders above this one that `fit` calls; their owners set them.

This module imports neither JAX nor Keras: `replicax/__init__` sets the default strategy
when a script first uses a name of replicax.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicax._util.types import PyTree
    from replicax.engine.protocols import StrategyLike

__all__ = ["add_callbacks", "default_strategy"]

default_strategy: "Callable[[], StrategyLike] | None" = None
"""Returns the strategy that trains a model made in no strategy's scope."""

add_callbacks: "Callable[[PyTree], PyTree] | None" = None
"""Adds callbacks to those of a `fit`, as `replicax run --profile` does; None: none."""
