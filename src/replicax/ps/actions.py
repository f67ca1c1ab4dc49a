"""Remote procedure calls of a server by name: JSON in, JSON out."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from replicax.ps.wire import WireError, read_json

__all__ = ["Actions", "Refused", "methods_of"]


class Refused(Exception):
    """A call is not there, or its arguments do not fit."""


def methods_of(owner: Any, name: str) -> dict[str, Callable[..., object]]:
    """The actions `<name>.<method>`: what stands in the owner's `ACTIONS`, no more."""
    return {f"{name}.{method}": getattr(owner, method) for method in owner.ACTIONS}


class Actions:
    """A table of functions that take and return JSON values.

    Args:
        table: The functions, by the name that clients use.
        incarnation: Stands in each answer. gRPC finds its way to a restarted server
            without a word, and so a client sees that it is another one.

    Example:
        >>> actions = Actions({"double": lambda value: 2 * value})
        >>> actions.answer("double", b'{"value": 4}')
        b'{"value": 8, "incarnation": ""}'
        >>> actions.answer("triple", b"{}")
        Traceback (most recent call last):
        replicax.ps.actions.Refused: there is no action 'triple'; there are ['double']
    """

    def __init__(
        self, table: Mapping[str, Callable[..., object]], incarnation: str = ""
    ) -> None:
        self._table = dict(table)
        self._incarnation = incarnation

    def answer(self, name: str, body: bytes) -> bytes:
        """Carry out an action.

        Args:
            name: Its name.
            body: Its arguments by name, a JSON object.

        Returns:
            JSON: `{"value": ..., "incarnation": ...}`.

        Raises:
            Refused: If there is no such action, or its arguments do not fit.
        """
        function = self._table.get(name)
        if function is None:
            known = sorted(self._table)
            raise Refused(f"there is no action {name!r:.80}; there are {known}")
        try:
            arguments = read_json(body)
        except WireError as error:
            raise Refused(f"the arguments of {name!r}: {error}") from error
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise Refused(f"the arguments of {name!r} do not fit: {error}") from error
        answer = {"value": function(**arguments), "incarnation": self._incarnation}
        return json.dumps(answer).encode()
