"""Train a small Keras model on several devices, with `fit`.

A Keras script for one device becomes one for many by two lines: make a strategy, and
make the model in its scope. Try it on a laptop, where CPU devices stand in for GPUs:

    python examples/digits_mirrored.py --replicas 2
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import common
import keras
from data import load


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--plot", default="digits_mirrored.png", metavar="PATH")
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    data = load(options.data)

    strategy = rx.MirroredStrategy(common.devices(options.replicas))  # Added.
    global_batch = options.batch_size * strategy.num_replicas_in_sync

    with strategy.scope():  # Added.
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
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    timer = common.EpochTimer(len(data.x_train))
    history = model.fit(
        data.x_train,
        data.y_train,
        batch_size=global_batch,
        epochs=options.epochs,
        validation_data=(data.x_test, data.y_test),
        callbacks=[timer],
    )

    accuracy = history.history["val_accuracy"][-1]
    common.print_report(strategy, data, global_batch, timer, accuracy)
    replicas = strategy.num_replicas_in_sync
    title = f"{data.name}, replicas: {replicas}, global batch: {global_batch}"
    common.plot_history(history.history, title, options.plot)


if __name__ == "__main__":
    main()
