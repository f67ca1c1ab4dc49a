"""Train a model in plain JAX with Optax, on several devices or on several machines.

`rx.distributed` is the only change to the optimizer: its update combines the gradients
over all replicas first, so parameters and optimizer state stay equal on all of them.

    python examples/optax_loop.py --replicas 2
    replicax run --workers 2 examples/optax_loop.py

With `--shard-update` each replica holds a part of the optimizer state.
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import itertools

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import load


def init_parameters(seed, sizes):
    """Weights and biases of dense layers, `sizes` being those of input to output."""
    rng = np.random.default_rng(seed)
    return [
        {
            "weight": rng.normal(0, np.sqrt(2 / m), (m, n)).astype("float32"),
            "bias": np.zeros(n, "float32"),
        }
        for m, n in itertools.pairwise(sizes)
    ]


def predict(parameters, images):
    x = images.reshape(images.shape[0], -1)
    for layer in parameters[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ parameters[-1]["weight"] + parameters[-1]["bias"]


def mean_loss(parameters, images, labels):
    logits = predict(parameters, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_optimizer(num_steps):
    """AdamW with a schedule, on gradients that are averaged and then clipped."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, num_steps // 10, num_steps)
    adamw = optax.adamw(rate, weight_decay=1e-3)
    return rx.distributed(optax.chain(optax.clip_by_global_norm(1.0), adamw))


def num_correct(parameters, batch, mask):
    images, labels = batch
    return jnp.sum((predict(parameters, images).argmax(axis=1) == labels) & mask)


def make_strategy(options):
    """The workers of the cluster, if a launcher has started several; else devices."""
    if rx.cluster_resolver.TFConfigClusterResolver().cluster_spec():
        return rx.MultiWorkerMirroredStrategy(shard_update=options.shard_update)
    devices = common.devices(options.replicas)
    return rx.MirroredStrategy(devices, shard_update=options.shard_update)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--shard-update", action="store_true")
    options = parser.parse_args()
    strategy = make_strategy(options)
    data = load(options.data)
    global_batch = options.batch_size * strategy.num_replicas_in_sync
    steps_per_epoch = -(-len(data.x_train) // global_batch)
    tx = make_optimizer(options.epochs * steps_per_epoch)

    parameters = init_parameters(0, (data.x_train[0].size, 128, data.num_classes))
    with strategy.scope():  # So that the state may be divided.
        state = tx.init(parameters)

    def train_step(parameters, state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(parameters, *batch)
        updates, state = tx.update(grads, state, parameters)
        loss = rx.get_replica_context().all_reduce("mean", loss)
        return optax.apply_updates(parameters, updates), state, loss

    examples = strategy.experimental_make_numpy_dataset((data.x_train, data.y_train))
    test_dataset = strategy.experimental_distribute_dataset(
        (data.x_test, data.y_test), batch_size=global_batch, remainder="pad"
    )
    timer = common.EpochTimer(len(data.x_train))
    accuracy = 0.0
    for epoch in range(options.epochs):
        # The last batch has fewer examples: replicas without any do not count.
        train_dataset = strategy.experimental_distribute_dataset(
            examples.shuffle(seed=epoch).batch(global_batch)
        )
        losses = []
        with timer.epoch():
            for batch in train_dataset:
                parameters, state, loss = strategy.run(
                    train_step, args=(parameters, state, batch)
                )
                losses.append(loss)
            loss = np.mean(losses)  # Waits for the devices.
        correct = 0
        for batch, mask in test_dataset:
            counts = strategy.run(num_correct, args=(parameters, batch, mask))
            correct += int(strategy.reduce(rx.ReduceOp.SUM, counts, axis=None))
        accuracy = correct / len(data.x_test)
        if strategy.is_chief:
            print(f"epoch {epoch + 1:2d}  loss {loss:.4f}  held out {accuracy:.2%}")
    if strategy.is_chief:
        common.print_report(strategy, data, global_batch, timer, accuracy)


if __name__ == "__main__":
    main()
