"""A table of raw features: a DNN classifier, trained, evaluated, exported and loaded.

569 tumours with 30 measurements each, from scikit-learn. Examples come as they are in a
table: the class is "malignant" or "benign", and the radius is a word.

    python examples/estimator_tabular.py
    replicax run --workers 2 --evaluator examples/estimator_tabular.py \
        --model-dir=/tmp/tumours

Every worker trains on its own rows. With an evaluator, that task evaluates and exports.
"""

import replicax as rx  # First: it chooses JAX as Keras' backend.

# isort: split
import argparse
import os
import tempfile
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

CLASSES = ["malignant", "benign"]
SIZES = ["small", "medium", "large"]


def table() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """569 rows: a column of words, one of numbers, the other measurements together."""
    dataset: Any = load_breast_cancer()
    x = (dataset.data - dataset.data.mean(axis=0)) / dataset.data.std(axis=0)
    features = {
        "size": np.array(SIZES)[np.digitize(dataset.data[:, 0], [12.0, 15.0])],
        "texture": x[:, 1].astype("float32"),
        "measured": x[:, 2:].astype("float32"),
    }
    return features, np.array(CLASSES)[dataset.target]


def columns() -> list[Any]:
    """How the raw features become the network's input."""
    fc = rx.feature_column
    size = fc.categorical_column_with_vocabulary_list("size", SIZES)
    texture = fc.numeric_column("texture")
    return [
        fc.indicator_column(size),
        fc.bucketized_column(texture, boundaries=[-1.0, 0.0, 1.0]),
        texture,
        fc.numeric_column("measured", shape=28),
    ]


def main() -> None:
    """Train, evaluate, export; then load what was exported and use it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", default=tempfile.mkdtemp(prefix="tumours-"))
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="per replica")
    options = parser.parse_args()

    if "TF_CONFIG" in os.environ:
        strategy: rx.Strategy = rx.MultiWorkerMirroredStrategy()
    else:
        rx.set_logical_devices(2)
        strategy = rx.MirroredStrategy()
    features, labels = table()
    rows, held_out = train_test_split(np.arange(len(labels)), random_state=0)

    def train_input(input_context: rx.InputContext) -> Any:
        # Each worker has its own rows, and goes through them again and again.
        own = rows[input_context.input_pipeline_id :: input_context.num_input_pipelines]
        batches = rx.estimator.numpy_input_fn(
            {name: x[own] for name, x in features.items()},
            labels[own],
            batch_size=options.batch_size,
            num_epochs=None,
            shuffle=True,
            seed=1,
        )
        return batches()

    def rows_of(indices: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return {name: x[indices] for name, x in features.items()}, labels[indices]

    classifier = rx.estimator.DNNClassifier(
        hidden_units=[32, 16],
        feature_columns=columns(),
        label_vocabulary=CLASSES,
        optimizer=keras.optimizers.Adam(3e-3),
        dropout=0.2,
        config=rx.estimator.RunConfig(
            model_dir=options.model_dir,
            train_distribute=strategy,
            save_checkpoints_steps=100,
            tf_random_seed=1,
        ),
    )
    receiver = rx.estimator.build_raw_serving_input_receiver_fn(
        {name: x[:1] for name, x in features.items()}
    )
    done = rx.estimator.train_and_evaluate(
        classifier,
        rx.estimator.TrainSpec(train_input, max_steps=options.max_steps),
        rx.estimator.EvalSpec(
            lambda: rows_of(held_out),
            exporters=rx.estimator.BestExporter(serving_input_receiver_fn=receiver),
            start_delay_secs=0,
            throttle_secs=0,
        ),
    )
    print(f"strategy           {strategy}")
    if done is None:
        print("This task has trained; the evaluator evaluates.")
        return
    results, _ = done
    assert results is not None
    print(f"steps              {results['global_step']}")
    print(f"held-out accuracy  {results['accuracy']:.1%}")
    print(f"held-out AUC       {results['auc']:.4f}")

    # What was exported needs none of this script, only replicax and JAX.
    best = os.path.join(options.model_dir, "export", "best_exporter")
    exported = rx.estimator.load_saved_model(best)
    first, expected = rows_of(held_out[:3])
    answers = exported(first)
    for word, probabilities, truth in zip(
        answers["classes"][:, 0], answers["probabilities"], expected, strict=True
    ):
        print(f"exported model     {word} ({probabilities.max():.0%}), is {truth}")


if __name__ == "__main__":
    main()
