"""DefaultStrategy: one replica, where JAX puts arrays anyway."""

from replicax.engine.devices import default_devices
from replicax.strategies.home import ReplicaHome
from replicax.strategies.strategy import Strategy

__all__ = ["DefaultStrategy"]


class DefaultStrategy(Strategy):
    """What `get_strategy()` answers outside any scope: one replica, here.

    Unlike the others it also runs variables that were created outside its scope.
    """

    _rehearses = False  # What a script does besides training is done.

    def __init__(self) -> None:
        super().__init__(default_devices()[:1])
        self.home = ReplicaHome(self.group, adopts=True)
