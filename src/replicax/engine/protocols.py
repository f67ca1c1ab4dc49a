"""Names of higher layers' classes, for annotations, and the source of a loop's steps.

The engine imports no higher layer at run time; type checkers see the classes.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from replicax._util.types import PyTree

if TYPE_CHECKING:
    from replicax.ps.fit import WorkQueueFit as StepQueue
    from replicax.report.recorder import Recorder as RecorderLike
    from replicax.strategies.home import ReplicaHome as Home
    from replicax.strategies.strategy import Strategy as StrategyLike
else:
    Home = RecorderLike = StepQueue = StrategyLike = Any

__all__ = [
    "STATE_HOME",
    "Home",
    "RecorderLike",
    "StepQueue",
    "StepSource",
    "StrategyLike",
]

STATE_HOME = "_replicax_home"
"""Attribute of an optimizer whose state is not on the replicas: the state's `Home`."""


class StepSource(Protocol):
    """The source of a training loop's steps: the data, or a work queue."""

    def steps(self) -> Iterator[tuple[int, int]]:
        """The first and the last step of each execution of the next epoch."""
        ...

    def next_execution(self) -> PyTree:
        """The batches of the next execution from `steps`; StopIteration at the end."""
        ...

    def end_early(self) -> None:
        """Called if the data end before the epoch's last step."""
        ...
