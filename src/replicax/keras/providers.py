"""Functions of higher layers that `fit` calls; the modules that own them set them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicax._util.types import PyTree
    from replicax.engine.protocols import StrategyLike

default_strategy: "Callable[[], StrategyLike]"
"""Returns the strategy that trains a model of no strategy."""

add_callbacks: "Callable[[PyTree], PyTree] | None" = None
"""Adds callbacks to those of every `fit`, as `replicax run --profile` does."""
