"""Train an embedding table that lies on parameter servers, row by row.

Every task runs this same script. The launcher starts all tasks on one machine:

    replicax run --workers 2 --ps 2 examples/large_embedding.py
    replicax run --workers 2 --ps 2 examples/large_embedding.py --rows 5000000

Each example is a bag of ids, and its label says whether most of its ids are "good". At
the end the chief prints the memory of the table, and how much its own process took.
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import argparse
import resource

import keras
import numpy as np

BAG = 8  # Ids of an example.
SEEN = 2000  # Number of ids that occur in examples, anywhere in the table.


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000, metavar="N")
    parser.add_argument("--width", type=int, default=16, metavar="N")
    parser.add_argument("--epochs", type=int, default=4, metavar="N")
    parser.add_argument("--examples", type=int, default=20_000, metavar="N")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N")
    return parser.parse_args()


def bags(num_rows: int, num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids `int32[n, BAG]` and labels `float32[n, 1]`, the same in every task."""
    rng = np.random.default_rng(0)
    seen = rng.integers(0, num_rows, SEEN).astype("int32")
    is_good = rng.random(SEEN) < 0.5
    chosen = rng.integers(0, SEEN, (num_examples, BAG))
    labels = is_good[chosen].mean(axis=1, keepdims=True) > 0.5
    return seen[chosen], labels.astype("float32")


def peak_memory_mb() -> float:
    """Most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    options = parse_options()
    # In a task of the type "ps" this serves, and ends the process after the training.
    strategy = rx.ParameterServerStrategy()
    ids, labels = bags(options.rows, options.examples)
    before = peak_memory_mb()

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((BAG,), dtype="int32"),
                # The name is the table's name on the servers.
                rx.layers.Embedding(options.rows, options.width, seed=1, name="words"),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(
            # Rows that are not in a batch, and their optimizer state, do not change.
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
        )

    history = model.fit(
        ids,
        labels,
        batch_size=options.batch_size,
        epochs=options.epochs,
        verbose=2 if strategy.is_chief else 0,
    )
    if strategy.is_chief:
        size = options.rows * options.width * 4 / 2**20
        grown = peak_memory_mb() - before
        print(f"table           {size:,.0f} MiB, and twice as much for Adam's state")
        print(f"this worker     {grown:,.0f} MiB more than before, XLA's included")
        print(f"accuracy        {history.history['binary_accuracy'][-1]:.1%}")


if __name__ == "__main__":
    main()
