"""Runs a step outside `jit` for debugging, on the whole batch."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from replicax._util.types import PyTree
from replicax.engine.composites import is_key
from replicax.engine.group import ReplicaGroup
from replicax.engine.replay import StepRun
from replicax.engine.replica import ReplicaContext
from replicax.engine.scope import entered_context
from replicax.engine.signature import Arguments, Options
from replicax.engine.variables import ChildScope

__all__ = ["one_replica", "run_eagerly"]


def one_replica(group: ReplicaGroup) -> ReplicaGroup:
    """A group whose only replica gets the global batch: what one device would be."""
    first = group.mesh.devices.reshape(group.axis.size, -1)[0]
    alone = group.on(list(first))
    return dataclasses.replace(
        alone,
        num_per_device=1,
        num_local=1,
        first_replica=0,
        defers_updates=False,
    )


def run_eagerly(
    fn: Callable[..., PyTree],
    arguments: Arguments,
    arrays: list[PyTree],
    group: ReplicaGroup,
    options: Options,
) -> PyTree:
    """Call `fn` as Python does; variables have their new values afterwards.

    `group` is of one replica. Of the options, `gradient_op` and `finish` count.
    """
    # Committed to no device, arrays go to where the variables are.
    free = [x if is_key(x) else jnp.asarray(np.asarray(x)) for x in arrays]
    args, kwargs = arguments.rebuild(free)
    context = ReplicaContext(group, gradient_op=options.gradient_op)
    with entered_context(context):
        run = StepRun(lambda: fn(*args, **kwargs), lambda: ChildScope(None))
        results = run.execute()
        for variable, value in run.scope.updates():
            variable.assign(value)
        return results if options.finish is None else options.finish(results)
