"""Seed 000, notes "Distributed Training": MirroredStrategy with Keras, custom loop.

The scripts stand here with imports and data changed, and with what was broken in them
mended; comments beside the lines quote the source.
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.conftest import mirrored

import replicax as rx

Examples = tuple[np.ndarray, np.ndarray]

pytestmark = [
    # The same programs run as the command ports them, in test_blocks.py.
    pytest.mark.slow,
    # Keras about `input_shape=`, and about any Grain dataset in `fit`.
    pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`"),
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]


@pytest.fixture(params=["digits", "mnist"])
def mnist(request: pytest.FixtureRequest) -> tuple[Examples, Examples]:
    """Images `uint8[N, h, w, 1]` in 0..255 with labels, to train on and held out."""
    if request.param == "digits":
        images, labels = request.getfixturevalue("digits")
        images = (images.reshape(-1, 8, 8, 1) * 255).astype("uint8")
        images, labels = images[:1792], labels[:1792]
        return (images[:1504], labels[:1504]), (images[1504:], labels[1504:])
    with np.load(request.getfixturevalue("data_dir") / "mnist.npz") as file:
        x_train, y_train = file["x_train"][:4096, :, :, None], file["y_train"][:4096]
        x_test, y_test = file["x_test"][:1024, :, :, None], file["y_test"][:1024]
    return (x_train, y_train.astype("int32")), (x_test, y_test.astype("int32"))


# Source: `def scale(image, label)`, `tf.cast`. Grain gives the example as one value.
def scale(example: Any) -> Any:
    image, label = example
    image = image.astype(np.float32)
    image /= 255
    return image, label


def fit_script(
    strategy: rx.Strategy, mnist: tuple[Examples, Examples], batch_size_per_replica: int
) -> tuple[Any, Any]:
    """The "Keras example"; the strategy is made by the caller."""
    mnist_train, mnist_test = map(strategy.experimental_make_numpy_dataset, mnist)
    input_shape = mnist[0][0].shape[1:]

    print(f"Number of devices: {strategy.num_replicas_in_sync}")

    BATCH_SIZE_PER_REPLICA = batch_size_per_replica  # Source: 64
    BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync

    # Source: `.map(scale).cache().shuffle(BUFFER_SIZE)`. The arrays are in memory, and
    # Grain shuffles all examples, not a buffer of them.
    train_dataset = mnist_train.map(scale).shuffle(seed=0).batch(BATCH_SIZE)
    test_dataset = mnist_test.map(scale).batch(BATCH_SIZE)

    with strategy.scope():
        model: Any = keras.Sequential(
            [
                keras.layers.Conv2D(32, 3, activation="relu", input_shape=input_shape),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )

        # Source: `model.complie`, `SparseCategoricalCrossetropy`.
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.Adam(),
            metrics=["accuracy"],
        )

    # The source ends here, before `fit`.
    history = model.fit(
        train_dataset, epochs=4, validation_data=test_dataset, verbose=0
    )
    return model, history.history


def test_fit_learns_and_keeps_the_replicas_equal(
    mnist: tuple[Examples, Examples], capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = mirrored(2)
    _, history = fit_script(strategy, mnist, batch_size_per_replica=16)
    assert capsys.readouterr().out == "Number of devices: 2\n"
    assert history["loss"] == sorted(history["loss"], reverse=True)
    assert history["val_accuracy"][-1] > 0.8
    strategy.check_replicas()


@pytest.mark.parametrize("mnist", ["digits"], indirect=True)
def test_fit_on_two_replicas_is_fit_on_one(mnist: tuple[Examples, Examples]) -> None:
    two, two_history = fit_script(mirrored(2), mnist, batch_size_per_replica=16)
    keras.utils.set_random_seed(0)
    one, one_history = fit_script(mirrored(1), mnist, batch_size_per_replica=32)
    for key in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(two_history[key], one_history[key], rtol=1e-3)
    for a, b in zip(two.weights, one.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-3)


def custom_script(
    strategy: rx.Strategy,
    mnist: tuple[Examples, Examples],
    batch_size_per_replica: int,
) -> tuple[list[float], float, Any]:
    """The "Custom training example"."""
    BATCH_SIZE = batch_size_per_replica * strategy.num_replicas_in_sync
    GLOBAL_BATCH_SIZE = BATCH_SIZE  # Used in the source and never set.
    mnist_train, mnist_test = map(strategy.experimental_make_numpy_dataset, mnist)
    # Every batch must have GLOBAL_BATCH_SIZE examples, by which the loss is divided.
    train_dataset = (
        mnist_train.map(scale).shuffle(seed=0).batch(BATCH_SIZE, drop_remainder=True)
    )

    train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)

    with strategy.scope():
        # Source: `reduction=tf.keras.losses.Reduction.NONE`, and no `from_logits=True`,
        # though the model it shows has no softmax.
        loss_object = keras.losses.SparseCategoricalCrossentropy(
            reduction="none", from_logits=True
        )

        def compute_loss(labels: Any, predictions: Any) -> Any:
            per_example_loss = loss_object(labels, predictions)
            return rx.compute_average_loss(
                per_example_loss, global_batch_size=GLOBAL_BATCH_SIZE
            )

    with strategy.scope():
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")

    with strategy.scope():
        # Source: `ResNetModel(classes=num_classes)`, defined nowhere: the model above.
        model: Any = keras.Sequential(
            [
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam()
        # Source: `checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)`,
        # never used. The test saves the model in Keras' way.

    def train_step(inputs: Any) -> Any:
        images, labels = inputs

        with rx.GradientTape() as tape:
            predictions = model(images, training=True)  # Source: `traianing=True`
            loss = compute_loss(labels, predictions)

        # Source: `tape.gradients`
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

        train_accuracy.update_state(labels, predictions)
        return loss

    # Source: `@tf.function` here; `run` compiles by itself.
    def distributed_train_step(dataset_inputs: Any) -> Any:
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        # Source: `pre_replica_losses`
        return strategy.reduce(rx.ReduceOp.SUM, per_replica_losses, axis=None)

    EPOCHS = 4  # Source: 10
    train_losses = []
    for _epoch in range(EPOCHS):
        total_loss = 0.0
        num_batches = 0
        for batch in train_dist_dataset:
            total_loss += distributed_train_step(
                batch
            )  # Source: `distributed_tran_step`
            num_batches += 1
        train_loss = total_loss / num_batches
        train_losses.append(float(train_loss))

    # Not in the source, which makes `test_accuracy` and does not use it.
    def test_step(inputs: Any, mask: Any) -> None:
        images, labels = inputs
        test_accuracy.update_state(labels, model(images), mask)

    test_dataset = strategy.experimental_distribute_dataset(
        mnist_test.map(scale).batch(BATCH_SIZE), remainder="pad"
    )
    for batch, mask in test_dataset:
        strategy.run(test_step, args=(batch, mask))
    accuracy: Any = test_accuracy.result()
    return train_losses, float(accuracy), model


@pytest.mark.parametrize("mnist", ["digits"], indirect=True)
def test_custom_loop_on_two_replicas_is_that_on_one(
    mnist: tuple[Examples, Examples], tmp_path: Path
) -> None:
    strategy = mirrored(2)
    losses, accuracy, model = custom_script(strategy, mnist, batch_size_per_replica=16)
    assert losses == sorted(losses, reverse=True)
    assert accuracy > 0.8
    strategy.check_replicas()

    keras.utils.set_random_seed(0)
    one_losses, one_accuracy, _ = custom_script(mirrored(1), mnist, 32)
    np.testing.assert_allclose(losses, one_losses, rtol=1e-3)
    assert accuracy == pytest.approx(one_accuracy, abs=0.01)

    model.save(tmp_path / "model.keras")
    loaded: Any = keras.saving.load_model(tmp_path / "model.keras")
    images = mnist[1][0][:8] / np.float32(255)
    np.testing.assert_allclose(loaded(images), model(images), rtol=1e-5)
