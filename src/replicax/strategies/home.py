"""`ReplicaHome`: the placement of variables between steps, and their updates."""

from collections.abc import Iterable, Sequence

import jax
import keras
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util.types import PyTree, Shape
from replicax.engine.group import ReplicaGroup
from replicax.engine.labels import Labels
from replicax.engine.program import Program
from replicax.engine.protocols import StepQueue
from replicax.engine.variables import Variable, is_seed_state
from replicax.errors import ContextError
from replicax.keras.session import FitSession
from replicax.keras.variables import adopt

__all__ = ["ReplicaHome"]


class ReplicaHome:
    """Places variables on the replicas' devices, mirrored or sharded.

    Programs update these variables. Subclasses store variables elsewhere, and update
    them after a program. `place` is the sharding of all variables; None: the group's
    layouts. `adopts` allows variables that were created outside the scope.

    Attributes:
        labels: The strategy's variables, by labels that are equal on all workers.
        on_replicas: Whether variables are on the replicas' devices.
        keeps_slots: Whether optimizer state is in variables of this process.
    """

    keeps_slots = True

    def __init__(
        self,
        group: ReplicaGroup,
        place: NamedSharding | None = None,
        *,
        adopts: bool = False,
    ) -> None:
        self.labels = Labels()
        self.on_replicas = place is None
        self._group = group
        self._place = place
        self._adopts = adopts

    def layout(self, variable: Variable) -> NamedSharding:
        """The sharding of a variable."""
        return self._place or self._group.layout(variable)

    def slot_layout(self, path: str, shape: Shape, aggregation: str) -> NamedSharding:
        """The sharding of an optimizer's variable that is about to be created."""
        spec = self._group.layouts.of_slot(path, shape, aggregation)
        return self._place or NamedSharding(self._group.mesh, spec)

    def own(self, variable: Variable) -> None:
        """Take ownership of a variable created in the scope, and set its sharding."""
        layout = self.layout(variable)
        internals.set_owned(variable)
        if internals.layout_of(variable) != layout:
            internals.set_layout(variable, layout)
        self.labels.add(variable)

    def require_owned(self, variables: Iterable[Variable], caller: str) -> None:
        """Raise unless each variable was created in the strategy's scope."""
        for variable in variables:
            layout, wanted = internals.layout_of(variable), self.layout(variable)
            if layout is None and (self._adopts or _is_random_state(variable)):
                adopt(variable)
                internals.set_layout(variable, wanted)
            elif layout != wanted:
                raise self._not_owned(variable, layout, caller)

    def _not_owned(
        self, variable: Variable, layout: object, caller: str
    ) -> ContextError:
        name, owner = f"{caller}: variable {variable.path!r}", self._group.strategy
        if layout is None:
            return ContextError(
                f"{name} was created outside the scope of {owner!r}. Create, build and "
                "compile models, and create metrics and optimizers, under `with "
                "strategy.scope():`."
            )
        if internals.is_owned(variable):
            return ContextError(
                f"{name} was created in the scope of another strategy (placed as "
                f"{layout}), not of {owner!r}. Create and use a model with the same "
                "strategy."
            )
        return ContextError(
            f"{name} was placed by keras.distribution, or by a layout of its own "
            f"({layout}), not by {owner!r}. Create the model after "
            "keras.distribution.set_distribution(None). In place of DataParallel use "
            "rx.MirroredStrategy, in place of ModelParallel "
            "rx.ModelParallelStrategy(layout_map)."
        )

    def execute(self, program: Program, arrays: Sequence[ArrayLike]) -> PyTree:
        """Run a program on the variables' values, and store the new values."""
        return program(internals.read_values(program.inputs), arrays).results

    def prepared_gradients(
        self, optimizer: keras.Optimizer, grads: list[jax.Array | None]
    ) -> list[jax.Array | None]:
        """Convert summed gradients to the form that a deferred update gets."""
        return grads

    def adds_up(self, *, trains: bool) -> bool:
        """Whether state such as metrics is summed over processes after the steps."""
        return False

    def claimed_steps(self, model: keras.Model, fit: FitSession) -> StepQueue | None:
        """The work queue from which workers take steps of `fit`; None: no queue."""
        return None

    def begin(self) -> None:
        """Called when `fit`, `evaluate` or `predict` begins."""

    def settle(self) -> object:
        """Called when `fit`, `evaluate` or `predict` ends."""

    def finalize(self, optimizer: keras.Optimizer) -> None:
        """Called when `fit` finalizes the variables that its optimizer trains."""


def _is_random_state(variable: Variable) -> bool:
    """Whether a variable is the seed of a random layer in a single process.

    A layer creates its seed in the constructor, perhaps outside the scope, and weights
    in `build`. With several processes seeds may differ, so they must be created in the
    scope.
    """
    return is_seed_state(variable) and jax.process_count() == 1
