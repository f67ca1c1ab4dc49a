"""The options of a replica function's program, and the forms of its results."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from replicax._util.types import JSON, PyTree
from replicax.engine.collectives import ReduceOp
from replicax.engine.variables import Variable

__all__ = ["Options", "Outputs"]


class Outputs(enum.Enum):
    """The form in which a program returns a replica function's results."""

    PER_REPLICA = enum.auto()  # [R, ...]: one entry per replica
    ROWS = enum.auto()  # [R*b, ...]: the replicas' rows, one after another
    MIRRORED = enum.auto()  # [...]: already equal on all replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a program; the defaults are those of `strategy.run`.

    Attributes:
        gradient_op: How the optimizer seam combines gradients.
        num_active: Replicas that hold examples of the batch; None: all.
        num_steps: Steps in one dispatch; arguments then have them as first dimension.
            None: one step, without that dimension.
        outputs: The form of the results. Of several steps those of the last are
            kept, except ROWS, which keeps all.
        finish: Called with the last step's results when the variables have their new
            values; what it returns are the results.
        variables: All variables that the function may touch. None: they are discovered,
            as those of deferred updates have to be.
        facts: What else must be the same on all workers, by name.
    """

    gradient_op: ReduceOp = ReduceOp.SUM
    num_active: int | None = None
    num_steps: int | None = None
    outputs: Outputs = Outputs.PER_REPLICA
    finish: Callable[[PyTree], PyTree] | None = None
    # The function decides on these, so they are no part of a program's key.
    variables: Sequence[Variable] | None = dataclasses.field(
        default=None, compare=False
    )
    facts: Mapping[str, JSON] = dataclasses.field(default_factory=dict, compare=False)
