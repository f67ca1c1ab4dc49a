"""The options and the results of a replica function's program."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._util.types import JSON, PyTree
from replicax.engine.collectives import ReduceOp
from replicax.engine.composites import require_dense
from replicax.engine.module_numbers import numbers_in_modules
from replicax.engine.values import is_per_replica
from replicax.engine.variables import Variable

__all__ = ["Options", "Outputs", "ResultStructure"]


class ResultStructure:
    """The structure of a replica function's results; errors name the function `name`.

    Composite arrays and `PerReplica`s raise a TypeError.
    """

    def __init__(self, out: PyTree, name: str) -> None:
        for leaf in jax.tree.leaves(out, is_leaf=is_per_replica):
            if is_per_replica(leaf):
                raise TypeError(
                    f"{name}: returned {leaf!r}, the values of all replicas. Pass this "
                    "PerReplica as an argument, strategy.run(fn, args=(value,)), so "
                    "that each replica returns its own value."
                )
        require_dense(out, f"{name}, as a result")
        leaves, self._structure = jax.tree.flatten(out)
        numbers = numbers_in_modules(leaves, self._structure)
        self._constants = [
            None if _is_array_like(x) and i not in numbers else x
            for i, x in enumerate(leaves)
        ]
        self.num_arrays = self._constants.count(None)

    def arrays(self, out: PyTree) -> list[jax.Array]:
        """The arrays in results of this structure, and its numbers as arrays.

        Numbers in Equinox modules are constants instead.
        """
        return [
            jnp.asarray(x.value if isinstance(x, keras.Variable) else x)
            for x, constant in zip(jax.tree.leaves(out), self._constants, strict=True)
            if constant is None
        ]

    def unflatten(self, arrays: Sequence[PyTree]) -> PyTree:
        """Rebuild the results; leaves that are no arrays are constants of the trace."""
        if self.num_arrays < len(self._constants):
            rest = iter(arrays)
            arrays = [next(rest) if x is None else x for x in self._constants]
        return jax.tree.unflatten(self._structure, arrays)


_ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, int, float, complex, keras.Variable)


def _is_array_like(x: object) -> bool:
    return isinstance(x, _ARRAY_LIKE) and not isinstance(x, str | bytes)


class Outputs(enum.Enum):
    """The form in which a program returns a replica function's results."""

    PER_REPLICA = enum.auto()  # [...] where equal on all replicas, else [R, ...]
    ROWS = enum.auto()  # [R*b, ...]: the replicas' rows, one after another
    MIRRORED = enum.auto()  # [...]: already equal on all replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a program; the defaults are those of `strategy.run`.

    Attributes:
        gradient_op: How gradients are combined before `optimizer.apply`.
        num_active: Number of replicas that hold examples of the batch; None: all.
        num_steps: Number of steps in one dispatch, the arguments' first dimension.
            None: one step, and no such dimension.
        outputs: The form of the results. A program of several steps returns the last
            step's results, or with ROWS the rows of all steps.
        finish: Maps the last step's results to the program's results; called after the
            last step, with the variables' new values.
        variables: All variables that the function may use. None: a first trace
            discovers them. Updates that replicas divide always need that trace.
        donated: Positions of arguments whose arrays are donated.
        donates_variables: Whether the old values of written variables are donated.
        facts: Values by name that must be equal on all workers.
    """

    gradient_op: ReduceOp = ReduceOp.SUM
    num_active: int | None = None
    num_steps: int | None = None
    outputs: Outputs = Outputs.PER_REPLICA
    finish: Callable[[PyTree], PyTree] | None = None
    donated: tuple[int, ...] = ()
    donates_variables: bool = True
    # Not in a program's key: `variables` and `facts` follow from the function.
    variables: Sequence[Variable] | None = dataclasses.field(
        default=None, compare=False
    )
    facts: Mapping[str, JSON] = dataclasses.field(default_factory=dict, compare=False)
