"""Dry runs: strategies take devices, and perhaps the run of programs, from a `DryRun`.

`replicax plan` compiles a script's training step for hardware that is not here.
`replicax migrate --check` executes a script's first steps on CPU devices, whichever
devices the script names.
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

__all__ = ["DryRun", "current_dry_run", "dry_running", "is_described", "runs_programs"]


class DryRun(Protocol):
    """The receiver of a dry run's programs."""

    @property
    def devices(self) -> Sequence[Any]:
        """All devices of the dry run."""
        ...

    @property
    def home(self) -> NamedSharding | None:
        """Where variables lie; None: on the devices, which run the programs."""
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


def runs_programs() -> bool:
    """Whether programs of this process are run, on data that are read."""
    return _current is None or _current.home is None


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
