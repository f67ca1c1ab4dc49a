"""Protocols of the objects from higher layers that the engine and Keras' loop use."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import jax
import keras
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from replicax._util.types import Logs, PyTree, Shape
from replicax.cluster.workers import Workers

if TYPE_CHECKING:
    from replicax.engine.cache import ProgramCache
    from replicax.engine.group import ReplicaGroup
    from replicax.engine.labels import Labels
    from replicax.engine.program import Program
    from replicax.engine.signature import FlatCall, Options
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

STATE_HOME = "_replicax_home"
"""Attribute of an optimizer whose state is not on the replicas: the state's `Home`."""


class StepSource(Protocol):
    """The source of a loop's steps: the data, or a work queue."""

    def steps(self) -> Iterator[tuple[int, int]]:
        """The first and the last step of each execution of the next epoch."""
        ...

    def next_execution(self) -> PyTree:
        """The batches of the next execution that `steps` yielded; or StopIteration."""
        ...

    def end_early(self) -> None:
        """Called when the data end before the epoch."""
        ...


class StepQueue(StepSource, Protocol):
    """The steps of a `fit` that workers share: each worker takes the next free step."""

    def begin(self, first: int, end: int) -> int:
        """Called after the callbacks' `on_train_begin`.

        Args:
            first: The first epoch of this worker.
            end: The epoch after the last one.

        Returns:
            The epoch that all workers begin with, or are in.
        """
        ...

    def end_epoch(self, logs: Logs | None) -> Logs | None:
        """Called when this worker finds no step; waits until the epoch ends for all.

        Args:
            logs: The logs of this worker's last step; None: it made no step.

        Returns:
            The logs of all workers; None or empty: the metrics' own logs are complete.
        """
        ...

    def after_epoch(self) -> None:
        """Called after the callbacks' `on_epoch_end`."""
        ...

    def close(self) -> None:
        """Called when `fit` ends."""
        ...


class RecorderLike(Protocol):
    """A recorder of how `fit` spends its time, for reports."""

    def begin_input(self) -> float:
        """The host begins to get a batch; returns the time, for `end_input`."""
        ...

    def end_input(
        self, began: float, shapes: PyTree, steps: int, examples: int
    ) -> None:
        """The host has the batch.

        Args:
            began: The result of `begin_input`.
            shapes: The shapes of the batch's arrays.
            steps: Number of training steps that use the batch.
            examples: Number of examples in the batch.
        """
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Count the block as a wait for other tasks, also within input."""
        ...

    def end_execution(self, logs: PyTree) -> None:
        """The host has dispatched an execution; `logs` may still be computed."""
        ...

    def end_steps(self) -> object:
        """The host has dispatched the epoch's last step; waits for the devices."""
        ...


class Home(Protocol):
    """The placement of a strategy's variables between steps, and their updates.

    Where variables live on the replicas, programs update them. Elsewhere the strategy
    does, on a parameter device, or parameter servers do. Methods around `fit` that have
    a body here do nothing unless a subclass overrides them.

    Attributes:
        labels: The strategy's variables, by labels that workers share.
        on_replicas: Whether variables live on the replicas' devices.
        keeps_slots: Whether optimizers' slots are variables of this process.
    """

    labels: "Labels"
    on_replicas: bool
    keeps_slots: bool

    def layout(self, variable: keras.Variable) -> NamedSharding:
        """The sharding of a variable."""
        ...

    def slot_layout(self, path: str, shape: Shape, aggregation: str) -> NamedSharding:
        """The sharding of an optimizer's slot that is about to be created."""
        ...

    def own(self, variable: keras.Variable) -> None:
        """Take ownership of a variable created in the scope, and set its sharding."""
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
        """Change summed gradients before the deferred update is made from them."""
        ...

    def adds_up(self, *, trains: bool) -> bool:
        """Whether summed state, such as metrics, is summed over processes later."""
        return False

    def claimed_steps(self, model: keras.Model, fit: object) -> StepQueue | None:
        """The work queue that shares the steps of `fit`; None: no steps are shared."""
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
        """Whether programs are compiled for a plan, and not run."""
        ...

    def run_placed(
        self,
        fn: Callable[..., PyTree],
        call: "FlatCall",
        options: "Options",
        programs: "ProgramCache[Program]",
    ) -> PyTree:
        """Run `fn` on arrays that are where the replicas want them."""
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
        """Whether this process does what one worker does for all, such as exports."""
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
