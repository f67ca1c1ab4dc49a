"""Dry runs: strategies pass their programs to a `ProgramReceiver`, and run none."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from jax.sharding import NamedSharding
from jax.stages import Lowered
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util.stand_ins import using_devices
from replicax._util.types import PyTree
from replicax.cluster.dispatch_log import Operation
from replicax.engine.group import ReplicaGroup
from replicax.engine.program import Program
from replicax.strategies.runner import ProgramRunner

if TYPE_CHECKING:
    from replicax.strategies.strategy import Strategy

__all__ = [
    "DryRunner",
    "ProgramReceiver",
    "current_receiver",
    "dry_run_of",
    "dry_running",
    "refuse_dry_run",
]


T = TypeVar("T")


class ProgramReceiver(Protocol):
    """The receiver of a dry run's programs."""

    @property
    def devices(self) -> Sequence[Any]:
        """All devices that programs are compiled for."""
        ...

    @property
    def home(self) -> NamedSharding:
        """The sharding of all variables: one real device, which holds their values."""
        ...

    def call(
        self,
        group: ReplicaGroup,
        program: Program,
        values: Sequence[PyTree],
        arrays: Sequence[ArrayLike],
    ) -> PyTree:
        """Return stand-ins for a program's results, or stop the script."""
        ...

    def receive(
        self, group: ReplicaGroup, operation: Operation, lowered: Lowered
    ) -> NoReturn:
        """Receive a training step that the user has jitted, and stop the script."""
        ...


_receiver: ProgramReceiver | None = None


def current_receiver() -> ProgramReceiver | None:
    """Return the receiver of the open dry run; None: programs are run."""
    return _receiver


@contextlib.contextmanager
def dry_running(receiver: ProgramReceiver) -> Generator[None]:
    """While open, new strategies pass their programs to a receiver."""
    global _receiver
    with using_devices(receiver.devices):
        _receiver = receiver
        try:
            yield
        finally:
            _receiver = None


@contextlib.contextmanager
def dry_run_of(strategy: "Strategy", receiver: ProgramReceiver) -> Generator[None]:
    """While open, pass an existing strategy's programs to a receiver.

    Variables stay where they are. No other thread may use the strategy meanwhile.
    """
    runner = strategy.runner
    devices = receiver.devices[: strategy.max_devices]
    strategy.runner = DryRunner(strategy.group.on(devices), receiver)
    try:
        yield
    finally:
        strategy.runner = runner


class DryRunner(ProgramRunner):
    """Passes programs to a receiver instead of running them."""

    is_dry = True

    def __init__(self, group: ReplicaGroup, receiver: ProgramReceiver) -> None:
        if group.updates_at_home:
            refuse_dry_run(type(group.strategy).__name__)
        super().__init__(group, None, None)
        self._receiver = receiver

    def call(self, program: Program, arrays: Sequence[ArrayLike]) -> PyTree:
        """Pass a program to the receiver; variables keep their values."""
        values = internals.read_values(program.inputs)
        return self._receiver.call(self.group, program, values, arrays)

    def run_jitted(
        self,
        call: Callable[[], T],
        lower: Callable[[], Lowered],
        operation: Callable[[], Operation],
    ) -> T:
        """Pass a training step that the user has jitted to the receiver."""
        self._receiver.receive(self.group, operation(), lower())


def refuse_dry_run(name: str) -> None:
    """Raise for a strategy that updates its variables apart from its replicas."""
    raise NotImplementedError(
        f"plan: the variables of {name} live apart from its replicas, which plans do "
        "not cover. Plan with a strategy whose replicas hold their variables, such as "
        "rx.MirroredStrategy or rx.FullyShardedStrategy."
    )
