"""Step time of each way that gradients can travel: operations, packs, compression.

One process, the first 2, 4 and 8 of 8 logical CPU devices, and two models: an MLP
784-2048-2048-10 with four large gradients, and one of many narrow layers with many
small ones. Global batch 256; SGD, unless said otherwise, so that the update is small
beside the sums. All ways take turns within each round, and ratios are those of
neighbours in a round.

    python benchmarks/gradient_travel.py
    python benchmarks/gradient_travel.py --optimizer adam --only shard
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import replicax as rx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--steps", type=int, default=10, help="steps in one timing")
parser.add_argument("--batch-size", type=int, default=256, help="global batch")
parser.add_argument("--layers", type=int, default=60, help="of the narrow model")
parser.add_argument("--optimizer", default="sgd", help="as Keras calls it")
parser.add_argument("--only", default="", help="ways whose name has this in it")
options = parser.parse_args()
rx.set_logical_devices(max(8, *options.replicas))

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

MB = 2**20
BATCH, STEPS = options.batch_size, options.steps
MODELS = {
    "MLP 784-2048-2048-10": [784, 2048, 2048, 10],
    f"{options.layers} layers of 64": [784, *[64] * options.layers, 10],
}
BASE = "NcclAllReduce"
PLAIN = rx.CommunicationOptions()
Ways = dict[str, Callable[[int], tuple[rx.CrossDeviceOps, rx.CommunicationOptions]]]
ALL_WAYS: Ways = {
    BASE: lambda k: (rx.NcclAllReduce(), PLAIN),
    "packs of 1 MB": lambda k: (
        rx.NcclAllReduce(),
        rx.CommunicationOptions(bytes_per_pack=MB),
    ),
    "packs of 8 MB": lambda k: (
        rx.NcclAllReduce(),
        rx.CommunicationOptions(bytes_per_pack=8 * MB),
    ),
    "bfloat16": lambda k: (
        rx.NcclAllReduce(),
        rx.CommunicationOptions(compression="bfloat16"),
    ),
    "HierarchicalCopyAllReduce": lambda k: (
        rx.HierarchicalCopyAllReduce(group_size=k // 2),
        PLAIN,
    ),
    "shard_update": lambda k: (rx.NcclAllReduce(), PLAIN),
}
WAYS = {
    name: make
    for name, make in ALL_WAYS.items()
    if options.only in name or name == BASE
}
rng = np.random.default_rng(0)
X = rng.normal(size=(BATCH, 784)).astype("float32")
Y = rng.integers(0, 10, BATCH).astype("int32")


def make_case(sizes: list[int], num_replicas: int, way: str) -> Callable[[], float]:
    """A function that trains `STEPS` steps and returns the last loss."""
    ops, travel = WAYS[way](num_replicas)
    strategy = rx.MirroredStrategy(
        jax.devices()[:num_replicas],
        ops,
        communication_options=travel,
        shard_update=way == "shard_update",
    )
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Dense(n, "relu") for n in sizes[1:-1]]
        model = keras.Sequential(
            [keras.Input((sizes[0],)), *hidden, keras.layers.Dense(sizes[-1])]
        )
        optimizer = keras.optimizers.get(options.optimizer)
        losses = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=None
        )
    weights = model.trainable_variables

    def loss_fn(x: jax.Array, y: jax.Array) -> jax.Array:
        return rx.compute_average_loss(losses(y, model(x)), global_batch_size=BATCH)

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = rx.value_and_grad(loss_fn, weights)(x, y)
        optimizer.apply(grads, weights)
        return loss

    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])

    def train() -> float:
        for _ in range(STEPS):
            loss = strategy.run(step, args=batch)
        return float(strategy.reduce("sum", loss))

    return train


def measure(sizes: list[int], num_replicas: int) -> dict[str, list[float]]:
    """Milliseconds a step, one value a round, for each way."""
    cases = {way: make_case(sizes, num_replicas, way) for way in WAYS}
    for case in cases.values():
        case()  # Compiles.
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, case in cases.items():
            start = time.perf_counter()
            case()
            times[way].append((time.perf_counter() - start) / STEPS * 1e3)
    return times


def spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    median = statistics.median(values)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


versions = f"JAX {jax.__version__}, Keras {keras.__version__}"
print(f"\nGlobal batch {BATCH}, {options.optimizer}, {versions};")
print(f"medians (minimum to maximum) of {options.rounds} rounds of {STEPS} steps")
for title, sizes in MODELS.items():
    num_weights = sum((a + 1) * b for a, b in itertools.pairwise(sizes))
    print(f"\n{title}, {num_weights * 4 / MB:.1f} MB of gradients\n")
    print(f"| replicas | gradients travel by | ms per step | ratio to {BASE} |")
    print("|---|---|---|---|")
    for num_replicas in options.replicas:
        times = measure(sizes, num_replicas)
        for way, values in times.items():
            ratios = [a / b for a, b in zip(values, times[BASE], strict=True)]
            print(
                f"| {num_replicas} | {way} | {spread(values, 1)} "
                f"| {spread(ratios, 2)} |",
                flush=True,
            )
