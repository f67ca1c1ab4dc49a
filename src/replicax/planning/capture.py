"""Captures the training step of a script or strategy: lowers it, and runs nothing.

Strategies pass their programs to a `Capture` instead of running them. The capture
lowers the first program that trains for the topology's devices, and stops the script
with an exception that scripts do not catch. Earlier programs return zeros.
"""

import contextlib
import logging
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax._private.jax import attention_of_card
from replicax._util.arrays import dtype_on_devices
from replicax._util.stand_ins import is_described
from replicax._util.types import PyTree
from replicax.cluster.dispatch_log import Operation
from replicax.engine.devices import Device
from replicax.engine.group import ReplicaGroup
from replicax.engine.program import Program
from replicax.engine.values import PerReplica, is_per_replica
from replicax.planning.cards import Card
from replicax.planning.topology import DeviceTopology
from replicax.strategies.dry_run import dry_run_of, dry_running
from replicax.strategies.strategy import Strategy

__all__ = [
    "Capture",
    "NoTrainingStepError",
    "capture_call",
    "capture_fit",
    "capture_script",
    "compile_lowered",
]

_logger = logging.getLogger("replicax")


class _Captured(BaseException):
    """Stops a script at its training step. Scripts may catch every `Exception`."""


class NoTrainingStepError(ValueError):
    """Raised if a script or function ends without a training step."""


class Capture:
    """Receives the programs that a strategy would run, and keeps the training step.

    Args:
        topology: The devices to compile for.

    Attributes:
        home: The placement of variables: a CPU of this machine.
        name: The name of the training step.
        lowered: The training step's program; None until it is captured.
        num_steps: The number of steps in one run of the program.
    """

    def __init__(self, topology: DeviceTopology) -> None:
        self.devices: Sequence[Device] = topology.devices
        cpu = jax.local_devices(backend="cpu")[0]
        self.home = NamedSharding(Mesh(np.array([cpu]), ("home",)), PartitionSpec())
        self.name = ""
        self.lowered: jax.stages.Lowered | None = None
        self.num_steps = 1
        self.num_replicas = 0
        self.num_devices = 0
        self._has_skipped = False
        self._topology = topology

    def call(
        self,
        group: ReplicaGroup,
        program: Program,
        values: Sequence[PyTree],
        arrays: Sequence[PyTree],
    ) -> PyTree:
        """Keep a program that trains; for any other, return zeros as its results."""
        lowered = program.lower(_shapes(values), _shapes(arrays))
        if program.trains:
            self.receive(group, program.operation, lowered)
        if not self._has_skipped:
            self._has_skipped = True
            _logger.warning(
                "plan: %s does not train. It and other such programs are not run "
                "here; their results are zeros.",
                _short(program.name),
            )
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), program.results_of(lowered)
        )

    def receive(
        self, group: ReplicaGroup, operation: Operation, lowered: jax.stages.Lowered
    ) -> NoReturn:
        """Keep a training step, and stop the script."""
        self.name = _short(operation.name)
        self.lowered = lowered
        self.num_steps = operation.num_steps
        self.num_replicas = group.num_replicas
        self.num_devices = group.mesh.size
        raise _Captured

    @contextlib.contextmanager
    def _until_captured(self, why_not: str) -> Iterator[None]:
        """Stop the block at its training step; without one, raise with `why_not`."""
        try:
            with (
                _attention_of(self._topology),
                dry_running(self),
                contextlib.suppress(_Captured),
            ):
                yield
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        if self.lowered is None:
            raise NoTrainingStepError(f"plan: {why_not}")


def _attention_of(topology: DeviceTopology) -> contextlib.AbstractContextManager[None]:
    """A context in which Keras chooses the attention kernel as on a topology's GPUs."""
    chip = topology.chip
    if isinstance(chip, Card):
        return attention_of_card(chip.compute_capability)
    return contextlib.nullcontext()


def capture_script(
    script: str,
    arguments: Sequence[str],
    topology: DeviceTopology,
    *,
    is_module: bool,
) -> Capture:
    """Run a script up to its first training step."""
    capture = Capture(topology)
    sys.argv = [script, *arguments]
    if not is_module:  # As Python does for a script.
        sys.path[0] = str(Path(script).resolve().parent)
    with capture._until_captured(
        f"{script} ended without a training step: no program in which an optimizer "
        "makes an update. Let it reach `fit`, a `strategy.run` that calls "
        "optimizer.apply, or your own step in strategy.watch(jax.jit(step)), with a "
        "strategy such as rx.MirroredStrategy()."
    ):
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    return capture


def capture_call(
    strategy: Strategy,
    step: Callable[..., object],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    topology: DeviceTopology,
) -> Capture:
    """Capture the program of `strategy.run(step, args, kwargs)` on a topology."""
    capture = Capture(topology)
    why_not = (
        f"{step!r} does not train: no optimizer makes an update in it. Pass the step "
        "that calls optimizer.apply."
    )
    with dry_run_of(strategy, capture), capture._until_captured(why_not):
        num = strategy.num_replicas_in_sync
        args, kwargs = _as_arrays((tuple(args), dict(kwargs)), num)
        strategy.run(step, args, kwargs)
    return capture


def capture_fit(
    strategy: Strategy,
    model: keras.Model,
    batch: Sequence[PyTree],
    topology: DeviceTopology,
) -> Capture:
    """Capture the program of `model.fit` for a global batch, on a topology."""
    capture = Capture(topology)
    arrays = _as_arrays(tuple(batch), strategy.num_replicas_in_sync)
    attributes = {name: getattr(model, name, None) for name in _CHANGED_BY_FIT}
    model.train_function = None  # Let `fit` compile it for the topology.
    why_not = (
        f"fit of model {model.name!r} ended without a step of {strategy!r}. Make and "
        "compile the model in the strategy's scope."
    )
    try:
        with dry_run_of(strategy, capture), capture._until_captured(why_not):
            batches = (arrays for _ in range(1))
            fit: Callable[..., object] = model.fit  # Keras: `verbose` is a str.
            fit(batches, steps_per_epoch=1, shuffle=False, verbose=0)
    finally:
        for name, value in attributes.items():
            setattr(model, name, value)
    return capture


def compile_lowered(
    lowered: jax.stages.Lowered, devices: Sequence[Device]
) -> jax.stages.Compiled:
    """Compile a program, without JAX's disk cache for described devices.

    JAX can write their programs to the cache, but cannot read them back.
    """
    if not is_described(devices[0]):
        return lowered.compile()
    was_on = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the option only once.
    try:
        return lowered.compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", was_on)
        compilation_cache.reset_cache()


_CHANGED_BY_FIT = ("history", "stop_training", "train_function")


def _short(name: str) -> str:
    """Shorten a program's name, as `"run(f.<locals>.step (line 12))"` to `"step"`."""
    name = re.sub(r"^\w+\((.*?)(?: \(line \d+\))?\)$", r"\1", name)
    return name.rpartition("<locals>.")[2]


def _shapes(values: Sequence[PyTree]) -> list[PyTree]:
    return [
        x
        if isinstance(x, int | float | complex)  # Python numbers have weak types.
        else jax.ShapeDtypeStruct(
            x.shape, dtype_on_devices(x.dtype), weak_type=getattr(x, "weak_type", False)
        )
        for x in values
    ]


def _as_arrays(tree: PyTree, num_replicas: int) -> PyTree:
    """Replace `ShapeDtypeStruct`s by arrays; give each `PerReplica` all entries."""

    def array(x: PyTree) -> PyTree:
        if isinstance(x, jax.ShapeDtypeStruct):
            # An array of any size, with one zero in memory.
            return np.broadcast_to(np.zeros((), x.dtype), x.shape)
        return x

    def convert(x: PyTree) -> PyTree:
        if not isinstance(x, PerReplica):
            return array(x)
        if x.array.shape[:1] == (num_replicas,):
            return x.with_array(jax.tree.map(array, x.array))
        # Made for another number of replicas: only the shape of an entry counts.
        shape = (num_replicas, *x.array.shape[1:])
        return PerReplica(array(jax.ShapeDtypeStruct(shape, x.array.dtype)))

    return jax.tree.map(convert, tree, is_leaf=is_per_replica)
