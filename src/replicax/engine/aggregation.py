"""Rules that combine the replicas' values of state, by the variables' paths.

Each replica computes state of layers from its own rows. The `aggregation` of a Keras
variable declares how the step combines its values at the end. A strategy's rule does
the same for variables without a declaration; or it is a function that combines each
assigned value at once, so that the step reads the combined value.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax

from replicax._util.arguments import matching_expression

__all__ = ["Aggregation", "AggregationRules", "Combine", "Rule", "aggregation_of"]

Combine: TypeAlias = Callable[[jax.Array], jax.Array]
Rule: TypeAlias = str | Combine
"""`"sum"`, `"mean"`, `"max"`, `"min"`, `"first"`, or a function of all values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aggregation:
    """How the replicas' values of a variable are combined.

    Attributes:
        of_keras: Keras' aggregation, by which the step combines at its end.
        combine: Combines each assigned value: `[R, ...]` of the replicas with examples
            to `[...]`. None: values are not combined when they are assigned.
    """

    of_keras: str = "none"
    combine: Combine | None = None


_BY_NAME = {
    "sum": Aggregation(of_keras="sum"),
    "mean": Aggregation(of_keras="mean"),
    "first": Aggregation(of_keras="only_first_replica"),
    "max": Aggregation(combine=lambda values: values.max(0)),
    "min": Aggregation(combine=lambda values: values.min(0)),
}


def aggregation_of(rule: Rule) -> Aggregation:
    """The aggregation of a rule; KeyError for an unknown name."""
    return Aggregation(combine=rule) if callable(rule) else _BY_NAME[rule]


class AggregationRules:
    """The rules given to a strategy as `aggregation`.

    Args:
        rules: Rules by regular expressions, which match a variable's whole path.
        caller: The strategy's name, for messages.

    Raises:
        TypeError: If `rules` is no mapping.
        ValueError: For an unknown rule or a malformed expression.
    """

    def __init__(self, rules: object, caller: str) -> None:
        if not isinstance(rules, Mapping | None):
            raise TypeError(
                f"{caller}: aggregation must be a dict of regular expressions to rules;"
                f" got {rules!r}. Write for example {{'.*/peak': 'max'}}."
            )
        self._caller = caller
        self._rules: dict[str, Aggregation] = {}
        self._paths: set[str] = set()
        entries: Mapping[str, Rule] = rules or {}
        for pattern, rule in entries.items():
            what = f"{caller}: aggregation[{pattern!r}]"
            if not callable(rule) and rule not in list(_BY_NAME):
                raise ValueError(
                    f"{what} must be {', '.join(map(repr, _BY_NAME))} or a function of "
                    f"the replicas' values [R, ...]; got {rule!r}."
                )
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"{what}: the key must be a regular expression; {error}."
                ) from error
            self._rules[pattern] = aggregation_of(rule)
        self._unmatched = set(self._rules)

    def of(self, path: str) -> Aggregation | None:
        """The rule for a new variable that is not trained; None: no rule matches.

        Raises:
            ValueError: If several expressions match.
        """
        if not self._rules:
            return None
        self._paths.add(path)
        pattern = matching_expression(self._rules, path, self._caller, "aggregation")
        if pattern is None:
            return None
        self._unmatched.discard(pattern)
        return self._rules[pattern]

    def require_matches(self) -> None:
        """Raise a ValueError for an expression that no variable has matched so far."""
        for pattern in sorted(self._unmatched):
            near = difflib.get_close_matches(pattern, self._paths, 5, cutoff=0)
            raise ValueError(
                f"{self._caller}: aggregation[{pattern!r}] matches the whole path of "
                "none of the variables with trainable=False that were created in the "
                f"scope before the first step; near paths: {', '.join(near) or 'none'}."
                " Correct the expression, or create the variable before that step."
            )
