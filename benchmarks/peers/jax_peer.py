"""The same step by hand in JAX: the limit."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import protocol
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

if protocol.WORLD > 1:
    jax.distributed.initialize(
        os.environ["BENCH_ADDRESS"],
        protocol.WORLD,
        protocol.RANK,
        cluster_detection_method="deactivate",
    )
mesh = Mesh(np.array(jax.devices()), ("replica",))


def local_loss(params: list, x: jax.Array, y: jax.Array) -> jax.Array:
    """This replica's part of the mean over the global batch."""
    for kernel, bias in params[:-1]:
        x = jax.nn.relu(x @ kernel + bias)
    kernel, bias = params[-1]
    log_p = jax.nn.log_softmax(x @ kernel + bias)
    return -jnp.take_along_axis(log_p, y[:, None], 1).sum() / protocol.BATCH


def step(state: tuple, x: jax.Array, y: jax.Array) -> tuple:
    """Gradients, their sum over the replicas, and Adam."""
    params, m, v, t = state
    loss, grads = jax.value_and_grad(local_loss)(params, x, y)
    loss, grads = jax.lax.psum((loss, grads), "replica")
    t = t + 1
    rate = protocol.LEARNING_RATE * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    m = jax.tree.map(lambda m, g: m + (g - m) * 0.1, m, grads)
    v = jax.tree.map(lambda v, g: v + (g * g - v) * 0.001, v, grads)
    params = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, m, v
    )
    return (params, m, v, t), loss


compiled = jax.jit(
    jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("replica"), P("replica")), out_specs=P()
    ),
    donate_argnums=0,
)
whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
zeros = [tuple(np.zeros_like(x) for x in pair) for pair in protocol.WEIGHTS]
state = jax.tree.map(
    lambda x: jax.make_array_from_callback(np.shape(x), whole, lambda _: x),
    (protocol.WEIGHTS, zeros, zeros, np.float32(0)),
)


def train(start: int, count: int) -> float:
    """Step after step, without a wait between them."""
    global state
    for i in range(start, start + count):
        batch = (
            jax.make_array_from_process_local_data(rows, x)
            for x in protocol.local_batch(i)
        )
        state, loss = compiled(state, *batch)
    return float(loss)


protocol.serve(train)
