"""`fit` on several replicas equals plain Keras: data, callbacks, backups."""

import csv

import grain
import keras
import pytest
from keras import layers

import replicax as rx

# 68 examples in batches of 24: the last has 20, which 8 replicas cannot share equally.
NUM_EXAMPLES, BATCH_SIZE = 68, 24
REPLICAS = 8

# Keras warns at the end of data of unknown length.
may_run_out = pytest.mark.filterwarnings("ignore:Your input ran out of data")


@pytest.fixture
def data(digits):
    return tuple(a[:NUM_EXAMPLES] for a in digits)


def classifier(rate=0.1):
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(12, activation="relu"), layers.Dense(10)]
    )
    model.compile(
        keras.optimizers.SGD(rate, 0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fitted(*args, callbacks=(), rate=0.1, **kwargs):
    model = classifier(rate)
    kwargs = {"epochs": 2, "verbose": 0, "shuffle": False, **kwargs}
    history = model.fit(*args, callbacks=list(callbacks), **kwargs)
    return model.get_weights(), history.history


def batches(data, repeat=1):
    x, y = data
    for _ in range(repeat):
        for start in range(0, NUM_EXAMPLES, BATCH_SIZE):
            yield x[start : start + BATCH_SIZE], y[start : start + BATCH_SIZE]


class Batches(keras.utils.PyDataset):
    def __init__(self, data):
        super().__init__()
        self.batches = list(batches(data))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def grain_batches(data):
    source = list(zip(*data, strict=True))
    return grain.MapDataset.source(source).batch(BATCH_SIZE)


@may_run_out
@pytest.mark.parametrize("source", [Batches, grain_batches], ids=["PyDataset", "Grain"])
def test_datasets(data, same_as_one_device, source):
    same_as_one_device(
        lambda: fitted(source(data), validation_data=source(data)), REPLICAS
    )


@may_run_out
@pytest.mark.parametrize(
    ("repeat", "per_execution"), [(3, 1), (2, 2)], ids=["enough", "exactly"]
)
def test_generators(data, same_as_one_device, repeat, per_execution):
    """The same batches are trained on, and as many are taken, as in plain Keras."""

    def work():
        model = classifier()
        model.steps_per_execution = per_execution
        history = model.fit(
            batches(data, repeat),
            steps_per_epoch=2,
            epochs=2,
            verbose=0,
            shuffle=False,
        )
        return model.get_weights(), history.history

    same_as_one_device(work, REPLICAS)


@pytest.mark.filterwarnings("error")  # Also warnings that other tests ignore.
@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
def test_data_of_64_bits_cause_no_warning(data, strategy_of, method):
    x, y = data[0], data[1].astype("int64")
    with strategy_of(2).scope():
        model = classifier()
        getattr(model, method)(x, y)
        assert model.built


@may_run_out
def test_generators_for_unbuilt_models(data, same_as_one_device):
    """Keras builds the model with a batch, which is trained on as well."""

    def work():
        model = keras.Sequential([layers.Dense(10)])
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        history = model.fit(batches(data), verbose=0, shuffle=False)
        return model.get_weights(), history.history

    same_as_one_device(work, REPLICAS)


@may_run_out
def test_evaluate_and_predict_on_generators(data, same_as_one_device):
    def work():
        model = classifier()
        scores = model.evaluate(batches(data), steps=2, verbose=0)
        return scores, model.predict(batches(data), verbose=0)

    _, predictions = same_as_one_device(work, REPLICAS)
    assert len(predictions) == NUM_EXAMPLES


def test_callbacks_see_the_same(data, same_as_one_device, tmp_path):
    """Logs of every batch and epoch, learning rates, files, and the time to stop."""
    files = iter(range(10))

    def work():
        seen = []
        folder = tmp_path / str(next(files))
        folder.mkdir()
        callbacks = [
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: seen.append((batch, dict(logs))),
                on_test_batch_end=lambda batch, logs: seen.append((batch, dict(logs))),
                on_epoch_end=lambda epoch, logs: seen.append((epoch, dict(logs))),
            ),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.ModelCheckpoint(
                folder / "{epoch}.weights.h5", save_weights_only=True
            ),
        ]
        trained = fitted(*data, BATCH_SIZE, callbacks=callbacks, validation_data=data)
        rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
        numbers = [{k: float(v) for k, v in row.items()} for row in rows]
        model = classifier()
        model.optimizer.build(model.trainable_variables)
        model.load_weights(folder / "1.weights.h5")
        return trained, seen, numbers, model.get_weights()

    trained, seen, rows, _ = same_as_one_device(work, REPLICAS)
    assert len(seen) == 2 * (3 + 3 + 1)
    assert trained[1]["learning_rate"] == pytest.approx([0.05, 0.025])
    assert len(rows) == 2


def test_callbacks_may_read_and_write_variables(data, same_as_one_device):
    """Between batches."""

    def work():
        read = []

        class Halve(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.jax_state_sync()
                read.append(self.model.get_weights())
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel * 0.5)

        return fitted(*data, BATCH_SIZE, callbacks=[Halve()]), read

    same_as_one_device(work, REPLICAS)


def test_backup_and_restore(data, outcome, assert_same, tmp_path):
    """Training that is interrupted ends as training that is not."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def interrupted():
        backup = [keras.callbacks.BackupAndRestore(tmp_path)]
        with pytest.raises(KeyboardInterrupt):
            fitted(*data, BATCH_SIZE, epochs=4, callbacks=[*backup, Interrupt()])
        weights, history = fitted(*data, BATCH_SIZE, epochs=4, callbacks=backup)
        assert len(history["loss"]) == 2
        return weights

    expected, _ = outcome(lambda: fitted(*data, BATCH_SIZE, epochs=4), 0)
    assert_same(outcome(interrupted, 4), expected)
    assert isinstance(rx.get_strategy(), rx.Strategy)
