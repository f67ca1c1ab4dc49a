"""Strategies in a dry run, whose programs are compiled but not run."""

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util.dry_run import DryRun
from replicax._util.types import PyTree
from replicax.engine.group import ReplicaGroup
from replicax.engine.program import Program
from replicax.strategies.runner import ProgramRunner

if TYPE_CHECKING:
    from replicax.strategies.strategy import Strategy

__all__ = ["DryRunner", "not_plannable", "require_plannable", "using_dry_run"]


class DryRunner(ProgramRunner):
    """Compiles programs for a dry run's devices, and passes them to the dry run.

    `num_devices` of the devices are used; None: all.
    """

    def __init__(
        self, group: ReplicaGroup, dry_run: DryRun, num_devices: int | None
    ) -> None:
        require_plannable(group)
        super().__init__(group.on(dry_run.devices[:num_devices]), None, None)
        self._dry_run = dry_run

    def call(self, program: Program, arrays: Sequence[ArrayLike]) -> PyTree:
        """Pass a program to the dry run; variables keep their values."""
        values = internals.read_values(program.inputs)
        return self._dry_run.call(self.group, program, values, arrays)


@contextlib.contextmanager
def using_dry_run(strategy: "Strategy", dry_run: DryRun) -> Generator[None]:
    """While open, pass a strategy's programs to a dry run.

    Variables stay where they are. No other thread may use the strategy meanwhile.
    """
    runner = strategy.runner
    num_devices = strategy.num_dry_run_devices
    strategy.runner = DryRunner(strategy.group, dry_run, num_devices)
    try:
        yield
    finally:
        strategy.runner = runner


def require_plannable(group: ReplicaGroup) -> None:
    """Raise if plans do not support a strategy's updates."""
    if group.updates_at_home:
        raise not_plannable(type(group.strategy).__name__)


def not_plannable(name: str) -> NotImplementedError:
    """Make the error for a strategy that plans do not support."""
    return NotImplementedError(
        f"plan: the variables of {name} live apart from its replicas, which plans do "
        "not cover. Plan with a strategy whose replicas hold them: rx.MirroredStrategy,"
        " MultiWorkerMirroredStrategy, TPUStrategy, OneDeviceStrategy, "
        "FullyShardedStrategy or ModelParallelStrategy."
    )
