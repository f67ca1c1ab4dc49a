"""Records how a process spends the time of a training, at almost no cost for a step.

Dispatch is asynchronous, so no single step is timed. The recorder measures the wall
time of an epoch, until the devices have finished, and how long the devices waited for
input: they wait if the last step's result is ready. The recorder blocks only around an
execution that compiles: otherwise earlier steps would finish during the compilation and
appear to take no time.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from replicax._util.types import PyTree
from replicax.engine.values import is_per_replica

__all__ = ["Recorder", "Tally"]


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts and times since the beginning of an epoch; times are in seconds.

    An execution is one start of a program, with one or several training steps. The
    first execution of a program compiles it.
    """

    executions: int = 0
    steps: int = 0
    examples: int = 0
    stalled_s: float = 0.0  # The host prepared a batch, and the devices were idle.
    waits_s: float = 0.0  # The host waited for other tasks.
    # Of first executions.
    first_executions: int = 0
    first_steps: int = 0
    first_examples: int = 0
    first_s: float = 0.0  # From the batch until the devices have finished.


class Recorder:
    """Counts the executions of a training and the devices' wait for input.

    In a custom loop the steps are the batches of the first dataset that it reads.
    `tally` has the counts of the epoch so far.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self._began = time.perf_counter()
        self._last: PyTree = None  # A result of the last execution.
        self._executed = 0, 0  # Steps and examples that were dispatched.
        self._steps_s: float | None = None  # The result of `end_steps`.
        self._compiled_shapes: set[PyTree] = set()
        # Of an execution that compiles: its start, and `waits_s` at that time.
        self._first: tuple[float, float] | None = None
        self._waits_in_input_s = 0.0
        self._devices_idle = True
        self._dataset: object = None  # Of a custom loop.

    # Epochs.

    def begin_epoch(self) -> None:
        """Reset the counts."""
        self.tally = Tally()
        self._executed = 0, 0
        self._steps_s = None
        self._began = time.perf_counter()

    def end_steps(self) -> float:
        """Wait for the devices; return the time since the epoch began.

        A second call returns the same time unless another step has begun: validation
        and callbacks are not training.
        """
        if self._steps_s is None:
            if not _is_ready(self._last):
                jax.block_until_ready(self._last)
            self._last = None
            self._steps_s = time.perf_counter() - self._began
        return self._steps_s

    # Steps.

    def read(self, dataset: object, read: Callable[[], PyTree]) -> PyTree:
        """Read a custom loop's next batch, and count it if it is for training."""
        self._dataset = self._dataset or dataset
        if self._dataset is not dataset:
            return read()
        if not self.tally.steps:  # The time since the last epoch does not count.
            self.begin_epoch()
        began = self.begin_input()
        try:
            batch = read()
        except StopIteration:
            self.end_steps()  # Before validation.
            raise
        leaves = jax.tree.leaves(batch, is_leaf=is_per_replica)
        shapes = tuple((np.shape(x.array), x.num_active) for x in leaves)
        (num_replicas, num_rows, *_), num_active = shapes[0]
        self.end_input(began, shapes, 1, (num_active or num_replicas) * num_rows)
        return batch

    def begin_input(self) -> float:
        """Start to time the host's work on a batch; return `began` for `end_input`."""
        self._devices_idle = _is_ready(self._last)
        self._waits_in_input_s = 0.0
        return time.perf_counter()

    def end_input(
        self, began: float, shapes: PyTree, steps: int, examples: int
    ) -> None:
        """Count a prepared batch with arrays of `shapes`, for `steps` steps."""
        tally = self.tally
        # Rounding may leave a negative difference.
        input_s = max(0.0, time.perf_counter() - began - self._waits_in_input_s)
        if self._devices_idle:
            tally.stalled_s += input_s
        elif _is_ready(self._last):
            tally.stalled_s += input_s / 2  # The devices became idle meanwhile.
        tally.steps += steps
        tally.examples += examples
        if shapes not in self._compiled_shapes:
            self._compiled_shapes.add(shapes)
            if self._first is None:
                if not _is_ready(self._last):
                    jax.block_until_ready(self._last)
                self._first = time.perf_counter(), tally.waits_s

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait for other tasks, not as work on input."""
        began = time.perf_counter()
        try:
            yield
        finally:
            wait_s = time.perf_counter() - began
            self.tally.waits_s += wait_s
            self._waits_in_input_s += wait_s

    def end_execution(self, logs: PyTree, num_steps: int = 1) -> None:
        """Count an execution after its dispatch; `logs` may not be ready."""
        tally = self.tally
        num_batches = tally.steps - self._executed[0]
        if num_batches or self._steps_s is None:
            self._last = _array_of(logs)
        if not num_batches:
            return  # A second program for the same batch, or an evaluation.
        tally.steps += max(0, num_steps - num_batches)
        self._steps_s = None
        tally.executions += 1
        if self._first is not None:
            self._end_first(*self._first)
        self._executed = tally.steps, tally.examples

    def _end_first(self, began: float, waits_s: float) -> None:
        """Count an execution that compiled, after its dispatch."""
        jax.block_until_ready(self._last)
        self._first = None
        tally, (steps, examples) = self.tally, self._executed
        first_s = time.perf_counter() - began - (tally.waits_s - waits_s)
        tally.first_executions += 1
        tally.first_steps += tally.steps - steps
        tally.first_examples += tally.examples - examples
        tally.first_s += max(0.0, first_s)


def _array_of(logs: PyTree) -> PyTree:
    """Return the smallest array of an execution's results; None without any.

    All become ready together, and keeping the smallest needs the least memory.
    """
    arrays = [x for x in jax.tree.leaves(logs) if hasattr(x, "is_ready")]
    return min(arrays, key=np.size, default=None)


def _is_ready(array: PyTree) -> bool:
    try:
        return array is None or array.is_ready()
    except RuntimeError:  # The step failed or donated it; the next step raises.
        return True
