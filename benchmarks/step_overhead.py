"""Step time of `run` and `fit` over the same step written by hand in JAX.

All cases train a 784-2048-2048-10 MLP with Adam on the same devices, global batch 256,
and take turns within each round, so that only ratios of neighbours are compared.

    python benchmarks/step_overhead.py --replicas 2
"""

import argparse
import statistics
import time
from collections.abc import Callable

import replicax as rx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--replicas", type=int, default=2, help="logical CPU devices")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--steps", type=int, default=20, help="steps in one timing")
parser.add_argument("--sizes", type=int, nargs="+", default=[784, 2048, 2048, 10])
parser.add_argument("--batch-size", type=int, default=256, help="global batch")
options = parser.parse_args()
rx.set_logical_devices(options.replicas)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

strategy = rx.MirroredStrategy()
mesh = strategy.group.mesh
SIZES, BATCH, STEPS = options.sizes, options.batch_size, options.steps
rng = np.random.default_rng(0)
X = rng.normal(size=(BATCH * STEPS, SIZES[0])).astype("float32")
Y = rng.integers(0, SIZES[-1], BATCH * STEPS).astype("int32")


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(n, "relu") for n in SIZES[1:-1]]
    return keras.Sequential(
        [keras.Input((SIZES[0],)), *hidden, keras.layers.Dense(SIZES[-1])]
    )


def make_adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(1e-3)


# Bare JAX: parameters, Adam and the all-reduce by hand.


def forward(params: list, x: jax.Array) -> jax.Array:
    for kernel, bias in params[:-1]:
        x = jax.nn.relu(x @ kernel + bias)
    kernel, bias = params[-1]
    return x @ kernel + bias


def local_loss(params: list, x: jax.Array, y: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(forward(params, x))
    return -jnp.take_along_axis(log_p, y[:, None], 1).sum() / BATCH


def bare_step(state: tuple, x: jax.Array, y: jax.Array) -> tuple:
    params, m, v, t = state
    loss, grads = jax.value_and_grad(local_loss)(params, x, y)
    grads = jax.lax.psum(grads, "replica")
    loss = jax.lax.psum(loss, "replica")
    t = t + 1
    rate = 1e-3 * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    m = jax.tree.map(lambda m, g: m + (g - m) * 0.1, m, grads)
    v = jax.tree.map(lambda v, g: v + (g * g - v) * 0.001, v, grads)
    params = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-7), params, m, v
    )
    return (params, m, v, t), loss


bare = jax.jit(
    jax.shard_map(
        bare_step,
        mesh=mesh,
        in_specs=(P(), P("replica"), P("replica")),
        out_specs=P(),
        check_vma=False,
    ),
    donate_argnums=0,
)
weights = make_model().get_weights()
params = list(zip(weights[::2], weights[1::2], strict=True))
zeros = jax.tree.map(np.zeros_like, params)
bare_state = jax.device_put(
    (params, zeros, jax.tree.map(np.copy, zeros), np.float32(0)),
    strategy.group.mirrored,
)
rows = strategy.group.per_replica
batch = jax.device_put((X[:BATCH], Y[:BATCH]), rows)


def bare_on_device() -> float:
    global bare_state
    for _ in range(STEPS):
        bare_state, loss = bare(bare_state, *batch)
    return float(loss)


def bare_from_host() -> float:
    global bare_state
    for i in range(0, BATCH * STEPS, BATCH):
        x, y = jax.device_put((X[i : i + BATCH], Y[i : i + BATCH]), rows)
        bare_state, loss = bare(bare_state, x, y)
    return float(loss)


# replicax: a custom loop and fit.

with strategy.scope():
    model, adam = make_model(), make_adam()
    losses = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )


def loss_fn(x: jax.Array, y: jax.Array) -> jax.Array:
    return rx.compute_average_loss(losses(y, model(x)), global_batch_size=BATCH)


def functional_step(x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = rx.value_and_grad(loss_fn, model.trainable_variables)(x, y)
    adam.apply(grads, model.trainable_variables)
    return loss


def tape_step(x: jax.Array, y: jax.Array) -> jax.Array:
    with rx.GradientTape() as tape:
        loss = loss_fn(x, y)
    grads = tape.gradient(loss, model.trainable_variables)
    adam.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    return loss


(distributed,) = strategy.experimental_distribute_dataset([(X[:BATCH], Y[:BATCH])])


def run_with(step: Callable) -> float:
    for _ in range(STEPS):
        loss = strategy.run(step, args=distributed)
    return float(strategy.reduce("sum", loss))


with strategy.scope():
    fitted = make_model()
    fitted.compile(
        make_adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )


def fit() -> float:
    history = fitted.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    return history.history["loss"][-1]


CASES = {
    "bare JAX, batch on the devices": bare_on_device,
    "run, value_and_grad": lambda: run_with(functional_step),
    "run, GradientTape": lambda: run_with(tape_step),
    "bare JAX, batches from the host": bare_from_host,
    "fit": fit,
}
OVER = {
    "run, value_and_grad": "bare JAX, batch on the devices",
    "run, GradientTape": "bare JAX, batch on the devices",
    "fit": "bare JAX, batches from the host",
}

first_call = {}
for name, case in CASES.items():
    start = time.perf_counter()
    case()
    first_call[name] = time.perf_counter() - start
times: dict[str, list[float]] = {name: [] for name in CASES}
for _ in range(options.rounds):
    for name, case in CASES.items():
        start = time.perf_counter()
        case()
        times[name].append((time.perf_counter() - start) / STEPS * 1e3)

print(f"\nMLP {SIZES}, global batch {BATCH}, {strategy}, JAX {jax.__version__}, ")
print(f"Keras {keras.__version__}; medians of {options.rounds} rounds of {STEPS} steps")
print("\n| case | ms per step | ratio to bare JAX (min to max) | first call s |")
print("|---|---|---|---|")
for name, values in times.items():
    ratio = ""
    if name in OVER:
        ratios = [a / b for a, b in zip(values, times[OVER[name]], strict=True)]
        ratio = f"{statistics.median(ratios):.3f}"
        ratio += f" ({min(ratios):.2f} to {max(ratios):.2f})"
    median = statistics.median(values)
    print(f"| {name} | {median:.2f} | {ratio} | {first_call[name]:.1f} |")
