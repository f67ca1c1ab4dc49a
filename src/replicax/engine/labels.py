"""Labels of a strategy's variables; a variable has the same label on all workers."""

import weakref
from collections.abc import Iterator

from replicax.engine.variables import Variable

__all__ = ["Label", "Labels"]


Label = tuple[str, int]
"""A variable's path, and the number of earlier variables with the same path."""


class Labels:
    """The variables of a strategy by label.

    All workers run the same script, but may create variables in different orders, such
    as optimizer state. Two variables may have the same path.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._variables = weakref.WeakValueDictionary[Label, Variable]()
        self._labels: dict[int, Label] = {}

    def add(self, variable: Variable) -> None:
        """Label a new variable."""
        number = self._counts.get(variable.path, 0)
        self._counts[variable.path] = number + 1
        label = (variable.path, number)
        self._variables[label] = variable
        self._labels[id(variable)] = label  # A freed variable may have had this id.

    @property
    def ever_used(self) -> bool:
        """Whether a variable was ever labelled, even if Python has freed it."""
        return bool(self._counts)

    def of(self, variable: Variable) -> Label:
        """The label of a variable of the strategy."""
        label = self._labels[id(variable)]
        if self._variables.get(label) is not variable:  # A freed variable had this id.
            raise KeyError(variable.path)
        return label

    def find(self, label: Label) -> Variable | None:
        """The variable of a label; None if this worker has no such variable."""
        return self._variables.get(label)

    def __iter__(self) -> Iterator[tuple[Label, Variable]]:
        """All labels and their variables."""
        return iter(list(self._variables.items()))
