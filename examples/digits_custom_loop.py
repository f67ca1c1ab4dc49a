"""Train a Keras model on several devices with a loop of your own.

The gradients come from a tape, as in TensorFlow scripts, or with `--functional` from
`rx.value_and_grad`, as in JAX. The input is a Grain pipeline.

    python examples/digits_custom_loop.py --replicas 2
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import common
import keras
from data import load


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--functional", action="store_true", help="use value_and_grad, not a tape"
    )
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    data = load(options.data)

    strategy = rx.MirroredStrategy(common.devices(options.replicas))
    global_batch = options.batch_size * strategy.num_replicas_in_sync

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(data.x_train.shape[1:]),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(data.num_classes),
            ]
        )
        optimizer = keras.optimizers.Adam(2e-3)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        # One loss per example: the division by the *global* batch comes below.
        example_loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=None
        )

    def forward(images, labels):
        logits = model(images, training=True)
        losses = example_loss(labels, logits)
        return rx.compute_average_loss(losses, global_batch_size=global_batch), logits

    def train_step(batch):
        """What one replica does with its part of a batch."""
        images, labels = batch
        with rx.GradientTape() as tape:
            loss, logits = forward(images, labels)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        accuracy.update_state(labels, logits)
        return loss

    def functional_train_step(batch):
        """The same without a tape."""
        images, labels = batch
        gradient = rx.value_and_grad(forward, model.trainable_variables, has_aux=True)
        (loss, logits), grads = gradient(images, labels)
        optimizer.apply(grads, model.trainable_variables)
        accuracy.update_state(labels, logits)
        return loss

    def test_step(batch, mask):
        images, labels = batch
        accuracy.update_state(labels, model(images, training=False), mask)

    step = functional_train_step if options.functional else train_step
    train_examples = strategy.experimental_make_numpy_dataset(
        (data.x_train, data.y_train)
    )
    # The last batch is not full: it is padded, and a mask marks the real examples.
    test_dataset = strategy.experimental_distribute_dataset(
        (data.x_test, data.y_test), batch_size=global_batch, remainder="pad"
    )
    num_batches = len(data.x_train) // global_batch
    timer = common.EpochTimer(num_batches * global_batch)
    for epoch in range(options.epochs):
        shuffled = train_examples.shuffle(seed=epoch)
        train_dataset = strategy.experimental_distribute_dataset(
            shuffled.batch(global_batch, drop_remainder=True)
        )
        accuracy.reset_state()
        loss = 0.0
        with timer.epoch():
            for batch in train_dataset:
                losses = strategy.run(step, args=(batch,))
                loss += strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)
            loss = float(loss) / num_batches  # Waits for the devices.
        print(
            f"epoch {epoch + 1:2d}  loss {loss:.4f}  accuracy {accuracy.result():.2%}",
            end="",
        )

        accuracy.reset_state()
        for batch, mask in test_dataset:
            strategy.run(test_step, args=(batch, mask))
        print(f"  held out {accuracy.result():.2%}")

    common.print_report(strategy, data, global_batch, timer, accuracy.result())


if __name__ == "__main__":
    main()
