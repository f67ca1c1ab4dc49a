"""A deep network and a jitted step with Adam, as in plain JAX."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax as rx
from replicax.planning.capture import Capture, compile_lowered
from replicax.planning.hlo_summary import Collective, read_program
from replicax.planning.topology import find_topology
from replicax.strategies.dry_run import dry_running

WIDTH, DEPTH, ROWS = 512, 8, 128
WEIGHT_BYTES = 4 * WIDTH * WIDTH * DEPTH  # 8.4 MB.
optimizer = optax.adam(1e-2)


def make_params(key: jax.Array, width: int = WIDTH, depth: int = DEPTH) -> Any:
    def layer(key: jax.Array) -> dict[str, jax.Array]:
        kernel = jax.random.normal(key, (width, width)) / width**0.5
        return {"kernel": kernel, "bias": jnp.zeros(width)}

    return [layer(key) for key in jax.random.split(key, depth)]


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(jnp.square(x - y))


def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    params, adam = state
    loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
    updates, adam = optimizer.update(gradients, adam, params)
    return (optax.apply_updates(params, updates), adam), loss


def data(num: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-0.9, 0.9, (2, num, width)).astype("float32")
    return x, y


class Program(NamedTuple):
    """A compiled step: its collectives, and its bytes on one device."""

    collectives: tuple[Collective, ...]
    arguments: int
    results: int
    updated_in_place: int
    temporaries: int


def compiled(topology: str, *, by_hand: bool) -> Program:
    """The step for 8 devices, with a strategy's shardings or with those `by_hand`."""
    devices = find_topology(topology).devices
    if by_hand:
        state, batch = _by_hand(Mesh(np.array(devices), ("data",)))
    else:
        with dry_running(Capture(find_topology(topology))):
            strategy = rx.FullyShardedStrategy()
            params = strategy.init(make_params, jax.random.key(0))
            state = (params, strategy.init(optimizer.init, params))
            rows = rx.PerReplica(np.zeros((8, ROWS, WIDTH), "float32"))
            batch = strategy.global_batch((rows, rows))
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch)
    program = compile_lowered(lowered, devices)
    memory = program.memory_analysis()
    return Program(
        read_program(program.as_text()).collectives,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def _by_hand(mesh: Mesh) -> Any:
    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec("data") if x.size >= 1024 else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.eval_shape(make_params, jax.random.key(0))
    state = params, jax.eval_shape(optimizer.init, params)
    rows = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
    return jax.tree.map(placed, (state, (rows, rows)))
