"""Train an Equinox module on several devices or on several machines.

The module goes through `strategy.run` as through `eqx.filter_jit`, and `rx.distributed`
lets Optax average gradients over the replicas. Each example has a dropout key of its
own, so any number of replicas trains to the same numbers.

    python examples/equinox_digits.py --replicas 2
    replicax run --workers 2 examples/equinox_digits.py
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import common
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import load


class Classifier(eqx.Module):
    """A dense network with one hidden layer and dropout, for one image."""

    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, num_inputs, num_classes, *, key):
        hidden_key, out_key = jax.random.split(key)
        self.hidden = eqx.nn.Linear(num_inputs, 128, key=hidden_key)
        self.dropout = eqx.nn.Dropout(0.2)
        self.out = eqx.nn.Linear(128, num_classes, key=out_key)

    def __call__(self, image, key=None):
        x = jax.nn.relu(self.hidden(image.ravel()))
        return self.out(self.dropout(x, key=key))


@eqx.filter_value_and_grad
def loss_and_grads(model, images, labels, keys):
    logits = jax.vmap(model)(images, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


optimizer = rx.distributed(optax.adam(3e-3))


def train_step(model, state, key, batch):
    images, labels, numbers = batch
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)
    loss, grads = loss_and_grads(model, images, labels, keys)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, state = optimizer.update(grads, state, params)
    loss = rx.get_replica_context().all_reduce("mean", loss)
    return eqx.apply_updates(model, updates), state, loss


def num_correct(model, batch, mask):
    images, labels = batch
    logits = jax.vmap(eqx.nn.inference_mode(model))(images)
    correct = jnp.sum((logits.argmax(axis=1) == labels) & mask)
    return rx.get_replica_context().all_reduce("sum", correct)


def make_strategy(options):
    """The workers of the cluster, if a launcher has started several; else devices."""
    if rx.cluster_resolver.TFConfigClusterResolver().cluster_spec():
        return rx.MultiWorkerMirroredStrategy()
    return rx.MirroredStrategy(common.devices(options.replicas))


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0])
    parser.add_argument("--save", metavar="FILE", help="where to save the module")
    options = parser.parse_args()
    strategy = make_strategy(options)
    data = load(options.data)
    global_batch = options.batch_size * strategy.num_replicas_in_sync

    key, dropout_key = jax.random.split(jax.random.key(0))
    model = Classifier(data.x_train[0].size, data.num_classes, key=key)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    examples = strategy.experimental_make_numpy_dataset(
        (data.x_train, data.y_train, np.arange(len(data.x_train)))
    )
    test_dataset = strategy.experimental_distribute_dataset(
        (data.x_test, data.y_test), batch_size=global_batch, remainder="pad"
    )
    timer = common.EpochTimer(len(data.x_train))
    accuracy = 0.0
    for epoch in range(options.epochs):
        train_dataset = strategy.experimental_distribute_dataset(
            examples.shuffle(seed=epoch).batch(global_batch)
        )
        key, losses = jax.random.fold_in(dropout_key, epoch), []
        with timer.epoch():
            for batch in train_dataset:
                arguments = (model, state, key, batch)
                model, state, loss = strategy.run(train_step, args=arguments)
                losses.append(loss)
            loss = np.mean(losses)  # Waits for the devices.
        counts = [strategy.run(num_correct, args=(model, *x)) for x in test_dataset]
        accuracy = float(sum(counts)) / len(data.x_test)
        if strategy.is_chief:
            print(f"epoch {epoch + 1:2d}  loss {loss:.4f}  held out {accuracy:.2%}")
    if strategy.is_chief:
        common.print_report(strategy, data, global_batch, timer, accuracy)
        if options.save:
            eqx.tree_serialise_leaves(options.save, model)


if __name__ == "__main__":
    main()
