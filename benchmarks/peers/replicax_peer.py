"""replicax: `fit` (argument "fit") or a loop of one's own ("run")."""

import sys

import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import protocol  # noqa: E402

with strategy.scope():
    hidden = [keras.layers.Dense(n, "relu") for n in protocol.SIZES[1:-1]]
    model = keras.Sequential(
        [keras.Input((protocol.SIZES[0],)), *hidden, keras.layers.Dense(10)]
    )
    model.set_weights([array for pair in protocol.WEIGHTS for array in pair])
    optimizer = keras.optimizers.Adam(protocol.LEARNING_RATE, epsilon=1e-8)
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    example_loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )


def fit(start: int, count: int) -> float:
    """`fit` on arrays, which every worker holds."""
    size = protocol.BATCH
    rows = np.arange(start * size, (start + count) * size) % len(protocol.X)
    history = model.fit(
        protocol.X[rows], protocol.Y[rows], batch_size=size, shuffle=False, verbose=0
    )
    return history.history["loss"][-1]


def replica_step(batch: tuple) -> object:
    """One step of one replica."""
    images, labels = batch

    def loss_fn() -> object:
        return rx.compute_average_loss(example_loss(labels, model(images)))

    loss, grads = rx.value_and_grad(loss_fn, model.trainable_variables)()
    optimizer.apply(grads, model.trainable_variables)
    return loss


def run(start: int, count: int) -> float:
    """A loop of one's own on a distributed dataset."""
    batches = strategy.experimental_distribute_dataset(
        lambda: (protocol.batch(i) for i in range(start, start + count))
    )
    for batch in batches:
        losses = strategy.run(replica_step, (batch,))
    return float(strategy.reduce("sum", losses))


protocol.serve(fit if sys.argv[1] == "fit" else run)
