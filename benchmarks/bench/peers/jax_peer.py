"""The same step by hand in JAX: the limit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import protocol
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_step import State, first_state, step_of

if protocol.WORLD > 1:
    jax.distributed.initialize(
        protocol.ADDRESSES[0],
        protocol.WORLD,
        protocol.RANK,
        cluster_detection_method="deactivate",
    )
replicas = len(jax.devices())
mesh = Mesh(np.array(jax.devices()), ("replica",))
steps_per_call = protocol.STEPS_PER_CALL
rows = P("replica") if steps_per_call == 1 else P(None, "replica")
step = step_of(protocol.CASE, replicas)


def steps(state: State, xs: jax.Array, ys: jax.Array) -> tuple[State, jax.Array]:
    """A step for each of the stacked batches; the last one's loss."""
    state, losses = jax.lax.scan(lambda state, xy: step(state, *xy), state, (xs, ys))
    return state, losses[-1]


def place(tree: Any, spec: P) -> Any:
    """Put this process' part of arrays on its devices."""
    if replicas == 1:
        return jax.device_put(tree)
    sharding = NamedSharding(mesh, spec)
    if protocol.WORLD == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), tree
    )


def host_batch(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """What one call needs: a batch, or some that are stacked."""
    if steps_per_call == 1:
        return protocol.local_batch(first)
    xs, ys = zip(*map(protocol.local_batch, range(first, last)), strict=True)
    return np.stack(xs), np.stack(ys)


def train(start: int, count: int) -> float:
    """Step after step, without a wait between them."""
    global state
    loss = jnp.nan
    for first in range(start, start + count, steps_per_call):
        last = min(first + steps_per_call, start + count)
        if held:
            batch = held[first % len(held)]
        else:
            batch = place(host_batch(first, last), rows)
        state, loss = compiled(state, *batch)
    return float(loss)


function = step if steps_per_call == 1 else steps
if replicas > 1:
    function = jax.shard_map(
        function, mesh=mesh, in_specs=(P(), rows, rows), out_specs=P()
    )
compiled = jax.jit(function, donate_argnums=0)
resident = protocol.resident_bytes()
state = place(first_state(protocol.CASE), P())
# All batches that there are, on the device already.
held: list[Any] = []
if protocol.ACCELERATED and steps_per_call == 1:
    held = [place(protocol.local_batch(i), rows) for i in range(protocol.NUM_BATCHES)]

if __name__ == "__main__":
    protocol.serve(
        train,
        resident=resident,
        wait=lambda: jax.block_until_ready(state) if protocol.ACCELERATED else None,
        device_peak=protocol.jax_peak_bytes,
    )
