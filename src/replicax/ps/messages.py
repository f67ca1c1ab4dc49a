"""Messages of the tensor streams, with their types and limits.

A message's header says in `"op"` which of these it is; its vectors come behind it. What
is not of this form is refused before memory is taken for the vectors.
"""

import msgspec

from replicax.ps.limits import Count
from replicax.ps.pushes import StepShare
from replicax.ps.table import TableSpec
from replicax.ps.variable_slices import VariableGroup

__all__ = [
    "Assign",
    "Averages",
    "Commit",
    "Create",
    "CreateTable",
    "Pull",
    "PullRows",
    "Push",
    "PushRows",
    "Replace",
]


class Create(msgspec.Struct):
    """Hold a group, with these values unless it is here."""

    group: VariableGroup


class Pull(msgspec.Struct):
    """A group's values, unless its version is `have`."""

    group: str
    have: int | None = None


class Push(msgspec.Struct):
    """Gradients of a group; `pull`: answer with the new values."""

    group: str
    worker: str
    session: str
    sequence: int
    based_on: int
    deadline_seconds: float
    part: StepShare | None = None
    pull: bool | None = True


class Commit(msgspec.Struct):
    """Squared norms of a whole gradient, with which a step is applied."""

    group: str
    step: int
    squared_norms: dict[str, float]


class Replace(msgspec.Struct):
    """Other values for a group."""

    group: str


class Averages(msgspec.Struct):
    """A group's moving averages."""

    group: str


class Assign(msgspec.Struct):
    """Another value for one of the optimizer's scalars."""

    group: str
    name: str
    value: float


class CreateTable(msgspec.Struct):
    """Hold a table. Its optimizer is said, and checked, when it is known."""

    spec: TableSpec


class PullRows(msgspec.Struct):
    """Values of a table's rows."""

    table: str


class PushRows(msgspec.Struct):
    """Gradients of a table's rows."""

    table: str
    group: str
    num_rows: Count
    worker: str
    session: str
    sequence: int
    part: StepShare | None
