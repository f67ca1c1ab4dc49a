"""Dry runs: programs are compiled but not run, for real or described devices.

`replicax plan` compiles a script's training step for hardware that is not here. In a
dry run, strategies take their devices from the `DryRun`, and pass it their programs
instead of running them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from replicax._util.types import PyTree

if TYPE_CHECKING:
    from replicax.engine.group import ReplicaGroup
    from replicax.engine.program import Program

__all__ = ["DryRun", "current_dry_run", "dry_running", "is_described"]


class DryRun(Protocol):
    """The receiver of a dry run's programs."""

    @property
    def devices(self) -> Sequence[Any]:
        """All devices of the dry run."""
        ...

    @property
    def home(self) -> NamedSharding:
        """The sharding of variables, since described devices cannot hold arrays."""
        ...

    @property
    def takes_default(self) -> bool:
        """Whether it receives the default strategy's programs, too."""
        ...

    def call(
        self,
        group: "ReplicaGroup",
        program: "Program",
        values: Sequence[PyTree],
        arrays: Sequence[ArrayLike],
    ) -> PyTree:
        """Replace `ProgramRunner.call` of a strategy with these replicas."""
        ...


_current: DryRun | None = None


def current_dry_run() -> DryRun | None:
    """Return the dry run of this process, for any thread; None: it is none."""
    return _current


@contextlib.contextmanager
def dry_running(dry_run: DryRun) -> Iterator[None]:
    """Make this process a dry run until the end of the block."""
    global _current
    if _current is not None:
        raise RuntimeError(
            "rx.plan: a plan is being made already; make one after another."
        )
    _current = dry_run
    try:
        yield
    finally:
        _current = None


def is_described(device: Any) -> bool:
    """Whether a JAX device is only a description, which cannot hold arrays."""
    return device.client.runtime_type == "compile_only_runtime"
