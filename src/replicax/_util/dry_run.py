"""Programs that are made and not run, for devices that may only be described.

`replicax plan` compiles a script's training step for hardware that is not here. While
it does, strategies take their devices from the rehearsal, and hand it their programs
instead of running them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jax.sharding import NamedSharding

__all__ = ["Rehearsal", "current_rehearsal", "is_described", "rehearsing"]


class Rehearsal(Protocol):
    """Who is handed the programs."""

    @property
    def devices(self) -> Sequence[Any]:
        """The devices that strategies take, all of them."""
        ...

    @property
    def home(self) -> NamedSharding:
        """Where variables live meanwhile: no array can lie on described devices."""
        ...

    def call(
        self, group: Any, program: Any, values: Sequence[Any], arrays: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Stand in for `ProgramRunner.call`, of a strategy with these replicas."""
        ...


_current: Rehearsal | None = None


def current_rehearsal() -> Rehearsal | None:
    """The rehearsal that this process is in, in whatever thread."""
    return _current


@contextlib.contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """Be in a rehearsal until the end of the block."""
    global _current
    if _current is not None:
        raise RuntimeError(
            "rx.plan: a plan is being made already; make one after another."
        )
    _current = rehearsal
    try:
        yield
    finally:
        _current = None


def is_described(device: Any) -> bool:
    """Whether a JAX device only describes one, so that no array can lie on it."""
    return device.client.runtime_type == "compile_only_runtime"
