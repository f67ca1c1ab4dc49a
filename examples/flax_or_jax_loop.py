"""Train a model written in plain JAX on several devices: no Keras in the model.

`strategy.run` takes and returns any pytree, so this is also how to train with Flax,
Equinox or Optax: parameters and optimizer state go through the step, one copy on each
replica, and `all_reduce` keeps the copies equal.

    python examples/flax_or_jax_loop.py --replicas 2
"""

import common
import jax
import jax.numpy as jnp
import numpy as np
from data import load

import replicax as rx

LEARNING_RATE, MOMENTUM = 0.05, 0.9


def init_parameters(seed, sizes):
    """Weights and biases of dense layers, `sizes` being those of input to output."""
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    return [
        {
            "weight": jax.random.normal(key, (m, n)) * jnp.sqrt(2 / m),
            "bias": jnp.zeros(n),
        }
        for key, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def predict(parameters, images):
    x = images.reshape(images.shape[0], -1)
    for layer in parameters[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ parameters[-1]["weight"] + parameters[-1]["bias"]


def mean_loss(parameters, images, labels):
    log_probabilities = jax.nn.log_softmax(predict(parameters, images))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


def train_step(parameters, velocity, batch):
    """One replica's step on its part of the batch: SGD with momentum."""
    loss, grads = jax.value_and_grad(mean_loss)(parameters, *batch)
    # From here on every replica has the gradients of the global batch.
    context = rx.get_replica_context()
    loss, grads = context.all_reduce(rx.ReduceOp.MEAN, (loss, grads))
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    parameters = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, parameters, velocity)
    return parameters, velocity, loss


def num_correct(parameters, batch, mask):
    images, labels = batch
    return jnp.sum((predict(parameters, images).argmax(axis=1) == labels) & mask)


def main() -> None:
    options = common.parser(__doc__).parse_args()
    data = load(options.data)

    strategy = rx.MirroredStrategy(common.devices(options.replicas))
    global_batch = options.batch_size * strategy.num_replicas_in_sync

    # The same seed on each replica: all start with equal parameters.
    sizes = (data.x_train[0].size, 128, data.num_classes)
    parameters = strategy.run(lambda: init_parameters(seed=0, sizes=sizes))
    velocity = strategy.run(lambda p: jax.tree.map(jnp.zeros_like, p), (parameters,))

    train_examples = strategy.experimental_make_numpy_dataset(
        (data.x_train, data.y_train)
    )
    test_dataset = strategy.experimental_distribute_dataset(
        (data.x_test, data.y_test), batch_size=global_batch, remainder="pad"
    )
    timer = common.EpochTimer(len(data.x_train) // global_batch * global_batch)
    accuracy = 0.0
    for epoch in range(options.epochs):
        shuffled = train_examples.shuffle(seed=epoch)
        train_dataset = strategy.experimental_distribute_dataset(
            shuffled.batch(global_batch, drop_remainder=True)
        )
        losses = []
        with timer.epoch():
            for batch in train_dataset:
                parameters, velocity, loss = strategy.run(
                    train_step, args=(parameters, velocity, batch)
                )
                losses.append(loss)
            loss = np.mean(losses)  # Waits for the devices.

        correct = 0
        for batch, mask in test_dataset:
            counts = strategy.run(num_correct, args=(parameters, batch, mask))
            correct += int(strategy.reduce(rx.ReduceOp.SUM, counts, axis=None))
        accuracy = correct / len(data.x_test)
        print(f"epoch {epoch + 1:2d}  loss {loss:.4f}  held out {accuracy:.2%}")

    common.print_report(strategy, data, global_batch, timer, accuracy)
    for copy in strategy.experimental_local_results(parameters[0]["weight"])[1:]:
        np.testing.assert_array_equal(copy, parameters[0]["weight"])
    print("All replicas hold the same parameters.")


if __name__ == "__main__":
    main()
