"""The same step by hand in JAX: the limit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import protocol
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_models import MODELS, Weights, computing, first_weights, loss_of

State = dict[str, Any]
"""`params`, `stats`, the moving statistics, and the optimizer's `m`, `v`, `step`."""

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
model = MODELS[protocol.CASE.model](protocol.CASE)


def loss_and_stats(
    params: Weights, stats: Weights, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, Weights]:
    """The mean loss over this replica's examples, and new moving statistics."""
    logits, stats = model(computing(protocol.CASE, params), stats, x)
    return loss_of(protocol.CASE, logits, y), stats


def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    """Gradients, their mean over the replicas, and the optimizer."""
    params, stats = state["params"], state["stats"]
    if replicas > 1:
        # Gradients of this replica's loss alone: of parameters that all replicas have
        # in common, JAX would sum each gradient where it arises.
        params = jax.lax.pcast(params, "replica", to="varying")
    grad_fn = jax.value_and_grad(loss_and_stats, has_aux=True)
    (loss, stats), grads = grad_fn(params, stats, x, y)
    if replicas > 1:
        loss, stats, grads = jax.lax.pmean((loss, stats, grads), "replica")
    update = sgd if protocol.CASE.momentum else adam
    return update(state, grads) | {"stats": stats}, loss


def adam(state: State, grads: Weights) -> State:
    """Parameters, their moments and the step's number after Keras' Adam."""
    t = state["step"] + 1
    power = t.astype("float32")
    rate = protocol.CASE.learning_rate * jnp.sqrt(1 - 0.999**power) / (1 - 0.9**power)
    m = jax.tree.map(lambda m, g: m + (g - m) * (1 - 0.9), state["m"], grads)
    v = jax.tree.map(lambda v, g: v + (g * g - v) * (1 - 0.999), state["v"], grads)
    params = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-7), state["params"], m, v
    )
    return {"params": params, "m": m, "v": v, "step": t}


def sgd(state: State, grads: Weights) -> State:
    """Parameters and their moments after Keras' SGD with momentum."""
    rate, momentum = protocol.CASE.learning_rate, protocol.CASE.momentum
    m = jax.tree.map(lambda m, g: m * momentum - g * rate, state["m"], grads)
    return {"params": jax.tree.map(jnp.add, state["params"], m), "m": m}


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


def first_state() -> State:
    """All that a step changes, before the first."""
    params, stats = first_weights(protocol.CASE)
    state = {"params": params, "stats": stats, "m": jax.tree.map(np.zeros_like, params)}
    if not protocol.CASE.momentum:
        state |= {"v": jax.tree.map(np.zeros_like, params), "step": np.int32(0)}
    return place(state, P())


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
state = first_state()
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
