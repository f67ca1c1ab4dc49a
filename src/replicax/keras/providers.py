"""Functions that `fit` calls; modules of higher layers assign them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicax._util.types import PyTree
    from replicax.engine.protocols import StrategyLike

default_strategy: "Callable[[], StrategyLike]"
"""Returns the strategy of a `fit` whose model has none."""

add_callbacks: "Callable[[PyTree], PyTree] | None" = None
"""Adds callbacks to every `fit`; `replicax run --profile` sets it."""
