"""Messages of the tensor streams, with their types and limits.

A message's header says in `"op"` which of these it is; its vectors come behind it. What
is not of this form is refused before memory is taken for the vectors.
"""

import re
from typing import Annotated, Any, TypeVar

import msgspec

from replicax.ps.pushes import StepShare
from replicax.ps.table import TableSpec
from replicax.ps.variable_slices import VariableGroup
from replicax.ps.wire import WireError

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
    "read",
]

Count = Annotated[int, msgspec.Meta(ge=0)]

_Message = TypeVar("_Message")


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


def read(kind: type[_Message], sent: object) -> _Message:
    """A message from JSON values.

    Raises:
        WireError: It is not of that kind; the message names the field and its value.

    Example:
        >>> read(Pull, {"group": 7})
        Traceback (most recent call last):
            ...
        replicax.ps.wire.WireError: group is 7; expected str, got int
    """
    try:
        return msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).replace("`", "").partition(" - at $")
        text = text[0].lower() + text[1:]
        if not path:
            raise WireError(text) from error
        value: Any = sent
        for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[name]
        raise WireError(f"{path[1:]} is {value!r:.80}; {text}") from error
