"""Train a Flax NNX model on several devices or on several machines.

`strategy.run` changes the model, the optimizer and the metrics in place, as `nnx.jit`
does. `rx.distributed` lets the optimizer average gradients over the replicas.

    python examples/nnx_digits.py --replicas 2
    replicax run --workers 2 examples/nnx_digits.py
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import common
import jax
import optax
from data import load
from flax import nnx


class Classifier(nnx.Module):
    """A dense network with one hidden layer."""

    def __init__(self, num_inputs, num_classes, *, rngs):
        self.hidden = nnx.Linear(num_inputs, 128, rngs=rngs)
        self.out = nnx.Linear(128, num_classes, rngs=rngs)

    def __call__(self, images):
        x = images.reshape(images.shape[0], -1)
        return self.out(nnx.relu(self.hidden(x)))


def mean_loss(model, images, labels):
    logits = model(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), logits


def train_step(model, optimizer, metrics, batch):
    images, labels = batch
    value_and_grad = nnx.value_and_grad(mean_loss, has_aux=True)
    (loss, logits), grads = value_and_grad(model, images, labels)
    optimizer.update(model, grads)
    loss = rx.get_replica_context().all_reduce("mean", loss)
    metrics.update(logits=logits, labels=labels)
    return loss


def test_step(model, metrics, batch):
    images, labels = batch
    metrics.update(logits=model(images), labels=labels)


def make_strategy(options):
    """The workers of the cluster, if a launcher has started several; else devices."""
    if rx.cluster_resolver.TFConfigClusterResolver().cluster_spec():
        return rx.MultiWorkerMirroredStrategy()
    return rx.MirroredStrategy(common.devices(options.replicas))


def main() -> None:
    options = common.parser(__doc__).parse_args()
    strategy = make_strategy(options)
    data = load(options.data)
    global_batch = options.batch_size * strategy.num_replicas_in_sync

    model = Classifier(data.x_train[0].size, data.num_classes, rngs=nnx.Rngs(0))
    tx = rx.distributed(optax.adam(3e-3))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    train_accuracy = nnx.metrics.Accuracy()
    test_accuracy = nnx.metrics.Accuracy()

    examples = strategy.experimental_make_numpy_dataset((data.x_train, data.y_train))
    test_dataset = strategy.experimental_distribute_dataset(
        (data.x_test, data.y_test), batch_size=global_batch
    )
    timer = common.EpochTimer(len(data.x_train))
    accuracy = 0.0
    for epoch in range(options.epochs):
        train_accuracy.reset()
        test_accuracy.reset()
        train_dataset = strategy.experimental_distribute_dataset(
            examples.shuffle(seed=epoch).batch(global_batch)
        )
        losses = []
        with timer.epoch():
            for batch in train_dataset:
                arguments = (model, optimizer, train_accuracy, batch)
                losses.append(strategy.run(train_step, args=arguments))
            losses = jax.device_get(losses)  # Waits for the devices.
        for batch in test_dataset:
            strategy.run(test_step, args=(model, test_accuracy, batch))
        accuracy = float(test_accuracy.compute())
        if strategy.is_chief:
            print(
                f"epoch {epoch + 1:2d}  loss {sum(losses) / len(losses):.4f}  "
                f"training {float(train_accuracy.compute()):.2%}  "
                f"held out {accuracy:.2%}"
            )
    if strategy.is_chief:
        common.print_report(strategy, data, global_batch, timer, accuracy)


if __name__ == "__main__":
    main()
