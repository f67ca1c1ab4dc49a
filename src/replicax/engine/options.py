"""How one program differs from another that runs the same function."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from replicax.engine.collectives import ReduceOp

__all__ = ["Options", "Outputs"]


class Outputs(enum.Enum):
    """What becomes of a replica function's results."""

    PER_REPLICA = enum.auto()  # [R, ...]: one entry per replica
    ROWS = enum.auto()  # [R*b, ...]: the replicas' rows, one after another
    MIRRORED = enum.auto()  # [...]: already equal on all replicas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a program differs from that of a plain `strategy.run`.

    Attributes:
        gradient_op: How the optimizer seam combines gradients.
        num_active: Replicas that hold examples of the batch; None: all.
        num_steps: Steps in one dispatch; arguments then have them as first dimension.
            None: one step, without that dimension.
        outputs: What becomes of the results. Of several steps those of the last are
            kept, except ROWS, which keeps all.
        finish: Called with the last step's results when the variables have their new
            values; what it returns are the results.
    """

    gradient_op: ReduceOp = ReduceOp.SUM
    num_active: int | None = None
    num_steps: int | None = None
    outputs: Outputs = Outputs.PER_REPLICA
    finish: Callable[[Any], Any] | None = None
