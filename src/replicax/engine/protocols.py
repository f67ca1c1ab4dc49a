"""Protocols of higher layers' objects that the engine and the training loop use."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

import jax
import keras
from jax.sharding import NamedSharding
from jax.stages import Lowered
from jax.typing import ArrayLike

from replicax._util.types import Logs, PyTree, Shape
from replicax.cluster.dispatch_log import Operation
from replicax.cluster.workers import Workers

if TYPE_CHECKING:
    from replicax.engine.arguments import FlatCall
    from replicax.engine.cache import ProgramCache
    from replicax.engine.group import ReplicaGroup
    from replicax.engine.labels import Labels
    from replicax.engine.program import Program
    from replicax.engine.signature import Options
    from replicax.input import InputShard

__all__ = [
    "STATE_HOME",
    "Home",
    "RecorderLike",
    "Runner",
    "StepQueue",
    "StepSource",
    "StrategyLike",
]

T = TypeVar("T")

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


class StepQueue(StepSource, Protocol):
    """The steps of a `fit` that workers share: each worker takes the next free step."""

    def begin(self, first: int, end: int) -> int:
        """Called after the callbacks' `on_train_begin`.

        Args:
            first: The first epoch of this worker.
            end: The epoch after the last one.

        Returns:
            The epoch that all workers start with, or have started.
        """
        ...

    def end_epoch(self, logs: Logs | None) -> Logs | None:
        """Called when the epoch has no free step; waits for the other workers' steps.

        Args:
            logs: The logs of this worker's last step; None if it made no step.

        Returns:
            The logs of all workers; None or empty: this worker's metrics have them.
        """
        ...

    def after_epoch(self) -> None:
        """Called after the callbacks' `on_epoch_end`."""
        ...

    def close(self) -> None:
        """Called when `fit` ends."""
        ...


class RecorderLike(Protocol):
    """A recorder of how a training spends its time, for reports."""

    def read(self, dataset: object, read: Callable[[], PyTree]) -> PyTree:
        """Called in place of `read`, which returns a custom loop's next batch."""
        ...

    def begin_input(self) -> float:
        """Called before the host gets a batch; returns the time, for `end_input`."""
        ...

    def end_input(
        self, began: float, shapes: PyTree, steps: int, examples: int
    ) -> None:
        """Called when the host has the batch.

        Args:
            began: The result of `begin_input`.
            shapes: The shapes of the batch's arrays.
            steps: Number of training steps that use the batch.
            examples: Number of examples in the batch.
        """
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """A context whose time counts as a wait for other tasks, even during input."""
        ...

    def end_execution(self, logs: PyTree, num_steps: int = 1) -> None:
        """Called after an execution's dispatch; devices may still compute `logs`."""
        ...

    def end_steps(self) -> object:
        """Called after the dispatch of the epoch's last step; waits for the devices."""
        ...


class Home(Protocol):
    """The placement of a strategy's variables between steps, and their updates.

    Programs update variables on the replicas. The home updates other variables: on a
    parameter device, or on parameter servers. The methods with a body here are hooks
    that do nothing by default.

    Attributes:
        labels: The strategy's variables, by labels that are equal on all workers.
        on_replicas: Whether variables are on the replicas' devices.
        keeps_slots: Whether optimizer state is in variables of this process.
    """

    labels: "Labels"
    on_replicas: bool
    keeps_slots: bool

    def layout(self, variable: keras.Variable) -> NamedSharding:
        """The sharding of a variable."""
        ...

    def slot_layout(self, path: str, shape: Shape, aggregation: str) -> NamedSharding:
        """The sharding of an optimizer's slot that will be created."""
        ...

    def own(self, variable: keras.Variable) -> None:
        """Register a variable created in the scope, and set its sharding."""
        ...

    def require_owned(self, variables: Iterable[keras.Variable], caller: str) -> None:
        """Raise unless each variable was created in the strategy's scope."""
        ...

    def execute(self, program: "Program", arrays: Sequence[ArrayLike]) -> PyTree:
        """Run a program on the variables' values, and store the new values."""
        ...

    def prepared_gradients(
        self, optimizer: keras.Optimizer, grads: list[jax.Array | None]
    ) -> list[jax.Array | None]:
        """Map summed gradients to those that the deferred update uses."""
        ...

    def adds_up(self, *, trains: bool) -> bool:
        """Whether state such as metrics is summed over processes after the steps."""
        return False

    def claimed_steps(self, model: keras.Model, fit: object) -> StepQueue | None:
        """The work queue from which workers take steps of `fit`; None: no queue."""
        return None

    def begin(self) -> None:
        """Called when `fit`, `evaluate` or `predict` begins."""
        pass

    def settle(self) -> object:
        """Called when `fit`, `evaluate` or `predict` ends."""
        pass

    def finalize(self, optimizer: keras.Optimizer) -> None:
        """Called when `fit` finalizes the variables that its optimizer trains."""
        pass


class Runner(Protocol):
    """Runs functions on a strategy's replicas, each as one compiled program."""

    @property
    def is_dry(self) -> bool:
        """Whether programs are compiled but not run, for a plan."""
        ...

    def run_placed(
        self,
        fn: Callable[..., PyTree],
        call: "FlatCall",
        options: "Options",
        programs: "ProgramCache[Program]",
    ) -> PyTree:
        """Run `fn` on arrays that are already on the replicas' devices."""
        ...

    def program_of(
        self,
        fn: Callable[..., PyTree],
        call: "FlatCall",
        options: "Options",
        programs: "ProgramCache[Program]",
    ) -> "Program":
        """The program that `run_placed` runs."""
        ...

    def dispatch(self, call: Callable[[], T], operation: Operation | None = None) -> T:
        """Dispatch a program, in which all workers take part if it has an operation."""
        ...

    def combine(self, name: str, fn: Callable[[], PyTree], value: PyTree) -> PyTree:
        """Dispatch `fn`, the operation `name` that combines `value` over replicas."""
        ...

    def run_jitted(
        self,
        call: Callable[[], T],
        lower: Callable[[], Lowered],
        operation: Callable[[], Operation],
    ) -> T:
        """Run a training step that the user has jitted.

        Args:
            call: Calls the step with its arguments.
            lower: Lowers it for these arguments.
            operation: Returns its entry in the dispatch log.
        """
        ...


class StrategyLike(Protocol):
    """The members of a strategy that programs and the Keras bindings use."""

    @property
    def home(self) -> Home:
        """The home of its variables."""
        ...

    @property
    def runner(self) -> Runner:
        """The runner of its programs."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose steps run together."""
        ...

    @property
    def group(self) -> "ReplicaGroup":
        """The replicas, for programs."""
        ...

    @property
    def workers(self) -> Workers:
        """The processes that train together."""
        ...

    @property
    def is_chief(self) -> bool:
        """Whether this process does work that only one worker does, such as exports."""
        ...

    @property
    def input_shard(self) -> "InputShard":
        """This process' part of the input."""
        ...

    def run(
        self,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Run `fn` on every replica at once, as one compiled program."""
        ...
