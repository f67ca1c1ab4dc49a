"""Train a Keras model on several machines, with `fit`.

Every worker runs this same script, and `TF_CONFIG` says which one it is. The launcher
starts workers on one machine; without it and without `TF_CONFIG` there is one worker:

    replicax run --workers 2 examples/multi_worker.py
    python examples/multi_worker.py

With `--backup` a run that was interrupted goes on where it was.
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import argparse

import common
import keras
from data import load


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        metavar="PATH",
        help=".npz file in the layout of keras.datasets; default: the 8x8 digits",
    )
    parser.add_argument("--epochs", type=int, default=15, metavar="N")
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="per replica"
    )
    parser.add_argument(
        "--backup", metavar="DIR", help="folder that all workers see; default: none"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    # Before anything else of JAX: it joins the other workers.
    strategy = rx.MultiWorkerMirroredStrategy()
    is_chief = strategy.is_chief
    keras.utils.set_random_seed(0)
    data = load(options.data)
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
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    timer = common.EpochTimer(len(data.x_train))
    callbacks: list[keras.callbacks.Callback] = [timer]
    if options.backup:
        callbacks.append(rx.BackupAndRestore(options.backup))
    # All workers pass the same data; each computes its rows of every batch.
    model.fit(
        data.x_train,
        data.y_train,
        batch_size=global_batch,
        epochs=options.epochs,
        validation_data=(data.x_test, data.y_test),
        callbacks=callbacks,
        verbose=2 if is_chief else 0,
    )
    # Every worker takes part in it, also those that print nothing.
    _, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
    if is_chief:
        common.print_report(strategy, data, global_batch, timer, accuracy)


if __name__ == "__main__":
    main()
