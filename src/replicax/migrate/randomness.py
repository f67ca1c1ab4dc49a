"""Random numbers in compiled steps: they come from a generator with state."""

from collections.abc import Iterator

import libcst as cst

from replicax.migrate.functions import is_traced
from replicax.migrate.script import Script, walk

__all__ = ["RANDOM", "plan_randomness"]

RANDOM = [
    "random.normal",
    "random_normal",
    "random.uniform",
    "random_uniform",
    "random.truncated_normal",
    "truncated_normal",
    "random.categorical",
    "random.shuffle",
]
"""Paths of functions that draw random numbers."""


def plan_randomness(script: Script) -> None:
    """Plan a `SeedGenerator` in a strategy's scope, for steps that need one.

    Steps that cannot see a scope's variables get none, and are reported.
    """
    for node in walk(script.module):
        if not isinstance(node, cst.Call) or not is_traced(script, node):
            continue
        if script.names.path(node.func) in RANDOM:
            visible = {script.module, *script.parents(node)}
            for block in _scopes(script):
                if (script.function_of(block) or script.module) in visible:
                    name = _free_name(script)
                    script.generators[node] = name
                    script.needed.add("keras")
                    made = f"{script.alias('keras')}.random.SeedGenerator(seed=0)"
                    script.first_lines[block] = f"{name} = {made}"
                    break


def _free_name(script: Script) -> str:
    name = "seed_generator"
    return f"{name}_" if script.names.is_bound(name) else name


def _scopes(script: Script) -> Iterator[cst.CSTNode]:
    """The blocks under `with strategy.scope():`."""
    for node in walk(script.module):
        if isinstance(node, cst.With) and isinstance(node.body, cst.IndentedBlock):
            call = node.items[0].item
            func = call.func if isinstance(call, cst.Call) else None
            if isinstance(func, cst.Attribute) and func.attr.value == "scope":
                yield node.body
