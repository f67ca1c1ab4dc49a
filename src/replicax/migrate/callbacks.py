"""Ports callbacks that assign variables between the batches of `fit`.

In `fit`, Keras 3 on JAX keeps the values of variables apart. At the end it overwrites
the variables with these values, unless a callback asks for the sync.
"""

import libcst as cst

from replicax.migrate.kinds import is_class_of
from replicax.migrate.script import Script
from replicax.migrate.tables import MESSAGES, NAMES
from replicax.migrate.tracing import class_of, with_called
from replicax.migrate.tree import attr_of, find, method_of

__all__ = ["plan_batch_callbacks"]


def plan_batch_callbacks(script: Script) -> None:
    """Plan a sync at the begin of the methods that change variables at a batch."""
    for name in NAMES["batch_callbacks"]:
        for function in script.functions(name):
            owner = class_of(script, function)
            is_own = owner is not None and is_class_of(script, owner, ("callback",))
            names = [param.name.value for param in function.params.params]
            if is_own and names[:1] == ["self"] and _assigns(script, function):
                script.first_lines[function.body] = "self.model.jax_state_sync()"
                script.note(function.name, MESSAGES["synced_state"])


def _assigns(script: Script, function: cst.FunctionDef) -> bool:
    """Whether a function, or what it calls, assigns variables of the model."""
    for each in with_called(script, [function]):
        targets = [target.target for target in find(each, cst.AssignTarget)]
        if any(attr_of(target) in {"lr", "learning_rate"} for target in targets):
            return True
        for call in find(each, cst.Call):
            is_method = method_of(call) in {*NAMES["assign_methods"], "set_weights"}
            if is_method or script.called(call) in NAMES["backend_writes"]:
                return True
    return False
