"""Train on one device, on several, or on several workers, to the same loss.

The script behind the promises of the README. The global batch is the same everywhere,
and 3 replicas do not divide it:

    python examples/promises.py --replicas 1
    python examples/promises.py --replicas 3
    replicax run --workers 2 examples/promises.py --backup digits --kill-at 105
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import argparse
import os
import signal

import common
import keras
from data import load


class Kill(keras.callbacks.Callback):
    """Kills this process after a step, as a machine does that runs out of memory."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self.model.optimizer.iterations == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="devices of this process; default: one replica on each worker",
    )
    parser.add_argument("--epochs", type=int, default=10, metavar="N")
    parser.add_argument("--backup", metavar="DIR", help="default: no backups")
    parser.add_argument(
        "--kill-at", type=int, metavar="STEP", help="worker 1 is killed there"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.replicas:
        strategy = rx.MirroredStrategy(common.devices(options.replicas))
    else:
        strategy = rx.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    data = load()

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(data.x_train.shape[1:]),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(data.num_classes),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(3e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    callbacks = []
    if options.backup:
        callbacks.append(rx.BackupAndRestore(options.backup, save_freq=10))
    if options.kill_at and strategy.cluster_resolver.task_id == 1:
        callbacks.append(Kill(options.kill_at))
    history = model.fit(
        data.x_train,
        data.y_train,
        batch_size=64,
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=0,
    )

    loss, accuracy = model.evaluate(data.x_test, data.y_test, verbose=0)
    if strategy.is_chief:
        print(f"replicas: {strategy.num_replicas_in_sync}, global batch 64")
        print(f"training loss {history.history['loss'][-1]:.6f} in the last epoch")
        print(f"held-out loss {loss:.6f}, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
