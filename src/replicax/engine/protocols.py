"""Names of higher layers' classes, for annotations.

The engine imports no higher layer at run time; type checkers see the classes. A `Home`
stores a strategy's variables; some homes also update them, after a program.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from replicax.keras.epochs import Epochs
    from replicax.ps.fit import WorkQueueFit as StepQueue
    from replicax.report.recorder import Recorder as RecorderLike
    from replicax.strategies.home import ReplicaHome as Home
    from replicax.strategies.strategy import Strategy as StrategyLike

    StepSource: TypeAlias = Epochs | StepQueue
else:
    Home = RecorderLike = StepQueue = StepSource = StrategyLike = Any

__all__ = [
    "STATE_HOME",
    "Home",
    "RecorderLike",
    "StepQueue",
    "StepSource",
    "StrategyLike",
]

STATE_HOME = "_replicax_home"
"""Attribute of an optimizer whose state is kept by a `Home`, not in variables."""
