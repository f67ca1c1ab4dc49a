"""Builds variables that a coordinator's functions build and this task does not have.

A layer without an input shape makes its weights in its first call. That is in a
function, which the chief does not run. So the chief traces the function, as TF does.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from replicax._private import keras as internals
from replicax._util.random_state import RandomStream
from replicax._util.types import PyTree
from replicax.engine.consistency import Label
from replicax.engine.variables import Variable
from replicax.ps.closure_calls import RemoteValue
from replicax.ps.payloads import PerWorkerValues

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = ["Rehearsals"]

_logger = logging.getLogger("replicax")
_Call = tuple[Callable[..., PyTree], Sequence[PyTree], Mapping[str, PyTree]]


class Rehearsals:
    """The first call of each scheduled function, which is traced if it has to be."""

    def __init__(
        self, strategy: "ParameterServerStrategy", random_numbers: RandomStream
    ) -> None:
        self._strategy = strategy
        self._random_numbers = random_numbers
        self._known: set[str] = set()
        self._left: dict[str, _Call] = {}

    def note(
        self,
        name: str,
        fn: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> None:
        """Keep a call of a function that is scheduled, if it is the first one."""
        if name not in self._known:
            self._known.add(name)
            self._left[name] = fn, args, kwargs

    def find(self, label: Label) -> Variable | None:
        """The variable of a label, built now if a scheduled function builds it."""
        labels = self._strategy.servers.labels
        while (variable := labels.find(label)) is None and self._left:
            name = next(iter(self._left))
            self._rehearse(name, self._left.pop(name))
        return variable

    def _rehearse(self, name: str, call: _Call) -> None:
        """Trace a function: `strategy.run` in it builds variables, and returns zeros.

        All variables have the values of before, and metrics that it builds have zeros,
        from which workers count.
        """
        home = self._strategy.servers
        before = {id(v): _value(v) for _, v in home.labels if internals.has_value(v)}
        fn, args, kwargs = call
        home.num_closures += 1
        home.rehearses = True
        try:
            with self._random_numbers, internals.names_counted_apart():
                args, kwargs = jax.tree.map(_argument, (tuple(args), dict(kwargs)))
                fn(*args, **kwargs)
        except (Exception, SystemExit):  # What needs its variables says so.
            _logger.warning(
                "ClusterCoordinator: %s builds variables. It was traced here to build "
                "them, too, and raised an error:",
                name,
                exc_info=True,
            )
        finally:
            home.rehearses = False
            home.num_closures -= 1
            for _, variable in home.labels:
                _reset(variable, before)


def _argument(value: PyTree) -> PyTree:
    if isinstance(value, PerWorkerValues):
        return value.own()
    if isinstance(value, RemoteValue):
        return value.known()
    return value


def _value(variable: Variable) -> jax.Array:
    return internals.read_values([variable])[0]


def _reset(variable: Variable, before: Mapping[int, jax.Array]) -> None:
    if id(variable) in before:
        internals.write_values([variable], [before[id(variable)]])
    elif variable.aggregation == "sum" and internals.has_value(variable):
        variable.assign(jnp.zeros_like(_value(variable)))
