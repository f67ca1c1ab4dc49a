"""Labels of a strategy's variables, by which workers mean the same variable."""

import weakref
from collections.abc import Iterator

from replicax.engine.variables import Variable

__all__ = ["Label", "Labels"]


Label = tuple[str, int]
"""A variable's path, and how many of that path were made before it."""


class Labels:
    """The variables of a strategy by label.

    Tasks run the same script and so make the same variables, but not in the same order
    where some make their optimizer's slots earlier than others. Paths alone may be
    equal: layers of two models may bear the same name.
    """

    def __init__(self) -> None:
        self._made: dict[str, int] = {}
        self._variables: dict[Label, weakref.ref[Variable]] = {}
        self._labels: dict[int, Label] = {}

    def add(self, variable: Variable) -> None:
        """Label a variable that was just made."""
        number = self._made.get(variable.path, 0)
        self._made[variable.path] = number + 1
        label = (variable.path, number)
        key = id(variable)

        def forget(_: object) -> None:
            self._variables.pop(label, None)
            if self._labels.get(key) == label:  # Not one that has the id by now.
                del self._labels[key]

        self._variables[label] = weakref.ref(variable, forget)
        self._labels[key] = label

    @property
    def are_used(self) -> bool:
        """Whether a variable was ever labelled, even if it is gone by now."""
        return bool(self._made)

    def of(self, variable: Variable) -> Label:
        """The label of a variable of the strategy."""
        return self._labels[id(variable)]

    def find(self, label: Label) -> Variable | None:
        """The variable of a label; None: this task has none, or no longer."""
        found = self._variables.get(label)
        return None if found is None else found()

    def __iter__(self) -> Iterator[tuple[Label, Variable]]:
        """All labels and their variables."""
        for label, ref in list(self._variables.items()):
            variable = ref()
            if variable is not None:
                yield label, variable
