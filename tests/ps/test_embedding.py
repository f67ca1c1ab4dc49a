"""An embedding whose rows are elsewhere trains as Keras' own does."""

import threading

import jax
import keras
import numpy as np
import pytest

import replicax as rx
from replicax.layers import Embedding
from replicax.ps.table import Table, TableError

NUM_SERVERS = 2
PIXEL_VALUES = 17  # 0 to 16
NUM_ROWS = 64 * PIXEL_VALUES
DIM = 8


class Servers:
    """A row source over two servers' tables in this process."""

    def __init__(self, optimizer):
        self.rule = {
            "kind": "optimizer",
            "config": keras.optimizers.serialize(optimizer),
        }
        self.tables = {}
        self.pulled = []
        self.collected = []
        self.error = None
        self.sequence = 0
        self.lock = threading.Lock()

    def create(self, spec):
        name = spec.name
        if name in self.tables:
            if not spec.fits(self.tables[name][0].spec):
                raise ValueError(f"another table {name!r} is there")
            return
        self.tables[name] = [
            Table(spec, server=i, num_servers=NUM_SERVERS) for i in range(NUM_SERVERS)
        ]

    def pull(self, name, ids):
        assert ids.dtype == np.int64
        with self.lock:
            self.pulled.append((name, ids))
        dim = self.tables[name][0].spec.dim
        rows = np.empty((len(ids), dim), np.float32)
        for i, table in enumerate(self.tables[name]):
            rows[ids % NUM_SERVERS == i] = table.rows(ids[ids % NUM_SERVERS == i])
        return rows

    def collect(self, name, ids, gradients):
        with self.lock:
            self.collected.append((name, ids, gradients))

    def fail(self, error):
        self.error = self.error or error

    def push(self):
        collected, self.collected = self.collected, []
        for name, tables in self.tables.items():
            mine = [(i, g) for n, i, g in collected if n == name]
            if not mine:
                continue
            ids = np.concatenate([i for i, _ in mine])
            gradients = np.concatenate([g for _, g in mine])
            for i, table in enumerate(tables):
                table.set_rule(self.rule, "weights")
                here = ids % NUM_SERVERS == i
                table.push_rows(
                    ids[here],
                    gradients[here],
                    worker="worker:0",
                    session="s",
                    sequence=self.sequence,
                )
        self.sequence += 1

    def whole(self, layer):
        return self.pull(layer.table_name, np.arange(layer.input_dim))


class ServedStrategy(rx.MirroredStrategy):
    """Mirrors what is dense; pushes the rows' gradients after each step."""

    def __init__(self, num_replicas, optimizer=None):
        super().__init__([f"cpu:{i}" for i in range(num_replicas)])
        self.home.rows = Servers(optimizer or keras.optimizers.SGD(0.5))
        self._call = self.runner.call
        self.runner.call = self._served

    def _served(self, program, arrays):
        result = jax.block_until_ready(self._call(program, arrays))
        error, self.home.rows.error = self.home.rows.error, None
        if error is not None:
            raise error
        self.home.rows.push()
        return result


@pytest.fixture(scope="module")
def pixels(digits):
    """Each pixel of a digit is a word: `int32[1797, 64]` of its place and value."""
    images, labels = digits
    places = np.arange(64, dtype="int32") * PIXEL_VALUES
    return np.round(images * 16).astype("int32") + places, labels


def digit_model(layer, steps_per_execution=1):
    model = keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layer,
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


def plain_twin(model, rows):
    """Keras' own layer, with the same first values."""
    twin = digit_model(keras.layers.Embedding(NUM_ROWS, DIM))
    twin.set_weights([rows, *(v.numpy() for v in model.layers[-1].variables)])
    return twin


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("num_replicas", [1, 2, 8])
def test_fit_equals_keras_on_digits(pixels, num_replicas):
    x, y = pixels[0][:325], pixels[1][:325]  # The last batch has 5.
    strategy = ServedStrategy(num_replicas)
    with strategy.scope():
        layer = Embedding(NUM_ROWS, DIM, name="words")
        model = digit_model(layer)
    source = strategy.home.rows
    twin = plain_twin(model, source.whole(model.layers[0]))
    history = model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0)
    expected = twin.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        history.history["loss"], expected.history["loss"], rtol=1e-5
    )
    np.testing.assert_allclose(
        source.whole(model.layers[0]),
        twin.layers[0].embeddings.numpy(),
        rtol=1e-4,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        model.layers[-1].kernel.numpy(), twin.layers[-1].kernel.numpy(), atol=1e-5
    )
    np.testing.assert_allclose(
        model.evaluate(x, y, verbose=0), twin.evaluate(x, y, verbose=0), rtol=1e-4
    )
    np.testing.assert_allclose(
        model.predict(x, verbose=0), twin.predict(x, verbose=0), rtol=1e-3, atol=1e-4
    )
    assert source.collected == []  # evaluate and predict have no gradients.
    assert [v.shape for v in layer.variables] == [(1,)]
    assert not layer.anchor.numpy().any()


def test_steps_of_one_execution_see_the_rows_from_before_it(pixels):
    x, y = pixels[0][:192], pixels[1][:192]
    strategy = ServedStrategy(2)
    with strategy.scope():
        layer = Embedding(NUM_ROWS, DIM, name="words")
        model = digit_model(layer, steps_per_execution=3)
    before = strategy.home.rows.whole(layer)
    model.fit(x, y, batch_size=64, shuffle=False, verbose=0)
    after = strategy.home.rows.whole(layer)
    assert (
        np.flatnonzero((after != before).any(axis=1)).tolist() == np.unique(x).tolist()
    )


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_custom_loop_equals_keras(pixels, num_replicas):
    strategy = ServedStrategy(num_replicas)
    with strategy.scope():
        model = digit_model(Embedding(NUM_ROWS, DIM, name="words"))
        optimizer = keras.optimizers.SGD(0.5)
    source = strategy.home.rows
    twin = plain_twin(model, source.whole(model.layers[0]))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def mean_loss(y, logits):
        return keras.ops.mean(loss_fn(y, logits))

    def step(x, y):
        with rx.GradientTape() as tape:
            loss = mean_loss(y, model(x)) / num_replicas
        gradients = tape.gradient(loss, model.trainable_variables)
        assert all(g is not None for g in gradients)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    for i in range(0, 192, 64):
        x, y = pixels[0][i : i + 64], pixels[1][i : i + 64]
        (batch,) = strategy.experimental_distribute_dataset([(x, y)])
        strategy.run(step, batch)
        twin.train_on_batch(x, y)
    np.testing.assert_allclose(
        source.whole(model.layers[0]),
        twin.layers[0].embeddings.numpy(),
        rtol=1e-4,
        atol=1e-6,
    )


def test_each_row_is_pulled_and_pushed_once_per_lookup():
    strategy = ServedStrategy(2)
    with strategy.scope():
        layer = Embedding(100, 4, embeddings_initializer="ones", name="words")
        layer.build()
    source = strategy.home.rows
    ids = np.array([[3, 3, 9], [3, 5, 5]], "int32")

    def step(ids):
        def loss():
            return keras.ops.sum(layer(ids))

        return rx.value_and_grad(loss, layer.trainable_variables)()

    (batch,) = strategy.experimental_distribute_dataset([ids])
    strategy.run(step, (batch,))
    assert sorted(i.tolist() for _, i in source.pulled) == [[3, 5], [3, 9]]
    rows = source.whole(layer)
    touched = np.flatnonzero((rows != 1).any(axis=1))
    assert touched.tolist() == [3, 5, 9]
    np.testing.assert_allclose(rows[[3, 5, 9], 0], 1 - 0.5 * np.array([3, 2, 1]))


def test_gradients_are_collected_only_when_asked_for(pixels):
    strategy = ServedStrategy(2)
    with strategy.scope():
        model = digit_model(Embedding(NUM_ROWS, DIM, name="words"))
    before = strategy.home.rows.whole(model.layers[0])
    dense = model.layers[-1].trainable_variables

    def step(x):
        with rx.GradientTape() as tape:
            loss = keras.ops.sum(model(x))
        return tape.gradient(loss, dense)

    (batch,) = strategy.experimental_distribute_dataset([pixels[0][:8]])
    strategy.run(step, (batch,))
    after = strategy.home.rows.whole(model.layers[0])
    np.testing.assert_array_equal(after, before)


def test_frozen_rows_stay(pixels):
    strategy = ServedStrategy(2)
    with strategy.scope():
        layer = Embedding(NUM_ROWS, DIM, name="words", trainable=False)
        model = digit_model(layer)
    before = strategy.home.rows.whole(layer)
    model.fit(pixels[0][:64], pixels[1][:64], verbose=0)
    np.testing.assert_array_equal(strategy.home.rows.whole(layer), before)


def test_mask_zero_and_two_tables():
    def make(layer_class, **options):
        words = keras.Input((5,), dtype="int32")
        topics = keras.Input((2,), dtype="int32")
        x = layer_class(50, 4, mask_zero=True, name="words", **options)(words)
        x = keras.layers.GlobalAveragePooling1D()(x)
        t = keras.layers.Flatten()(layer_class(9, 3, name="topics", **options)(topics))
        y = keras.layers.Dense(1, kernel_initializer="ones")(
            keras.layers.Concatenate()([x, t])
        )
        model = keras.Model([words, topics], y)
        model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
        return model

    rng = np.random.default_rng(0)
    words = rng.integers(0, 50, (32, 5)).astype("int32")
    words[:, 3:] = 0
    words[:, 0] = np.maximum(words[:, 0], 1)
    topics = rng.integers(0, 9, (32, 2)).astype("int32")
    target = rng.standard_normal((32, 1)).astype("float32")
    strategy = ServedStrategy(2)
    with strategy.scope():
        model = make(Embedding)
    source = strategy.home.rows
    twin = make(keras.layers.Embedding)
    for name in ("words", "topics"):
        twin.get_layer(name).set_weights([source.whole(model.get_layer(name))])
    for m in (model, twin):
        m.fit([words, topics], target, batch_size=8, shuffle=False, verbose=0)
    for name in ("words", "topics"):
        np.testing.assert_allclose(
            source.whole(model.get_layer(name)),
            twin.get_layer(name).embeddings.numpy(),
            rtol=1e-4,
            atol=1e-6,
        )


def test_a_bad_id_is_an_error_and_not_a_hang():
    strategy = ServedStrategy(2)
    with strategy.scope():
        layer = Embedding(100, 4, name="words")
        layer.build()

    def step(ids):
        rows = layer(ids)
        return rx.get_replica_context().all_reduce("sum", keras.ops.sum(rows))

    (good,) = strategy.experimental_distribute_dataset([np.arange(8)])
    (bad,) = strategy.experimental_distribute_dataset([np.arange(93, 101)])
    strategy.run(step, (good,))
    with pytest.raises(
        ValueError, match="'words': id 100 at position 3 is not one of its rows 0 to 99"
    ):
        strategy.run(step, (bad,))
    strategy.run(step, (good,))


@pytest.mark.slow
def test_many_lookups_at_once_do_not_block_each_other():
    """More callbacks than XLA has threads, with arrays that are copied in pieces."""
    strategy = ServedStrategy(8, keras.optimizers.Adam(0.01))
    num_tables, length = 6, 2048
    with strategy.scope():
        layers = [Embedding(500, 16, name=f"table_{i}") for i in range(num_tables)]
        for layer in layers:
            layer.build()
    anchors = [layer.anchor for layer in layers]

    def step(ids):
        def loss():
            return keras.ops.sum(sum(layer(ids) for layer in layers) ** 2)

        value, gradients = rx.value_and_grad(loss, anchors)()
        context = rx.get_replica_context()
        return context.all_reduce("sum", (value, gradients))[0]

    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 500, (16, length)).astype("int32") for _ in range(5)]
    losses = [
        float(strategy.run(step, (batch,)))
        for batch in strategy.experimental_distribute_dataset(batches)
    ]
    assert losses[-1] < losses[0]
    assert all(t.version == 5 for n in strategy.home.rows.tables.values() for t in n)


@pytest.mark.parametrize("num_replicas", [0, 2])
def test_without_servers_it_is_the_keras_layer(pixels, num_replicas, tmp_path):
    def fitted(layer_class):
        keras.utils.set_random_seed(3)
        model = digit_model(layer_class(NUM_ROWS, DIM, name="words"))
        model.fit(pixels[0][:128], pixels[1][:128], shuffle=False, verbose=0)
        return model

    if num_replicas:
        strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        with strategy.scope():
            ours, theirs = fitted(Embedding), fitted(keras.layers.Embedding)
    else:
        ours, theirs = fitted(Embedding), fitted(keras.layers.Embedding)
    assert [v.name for v in ours.variables] == [v.name for v in theirs.variables]
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert ours.layers[0].table_name is None
    ours.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is Embedding
    np.testing.assert_array_equal(
        loaded.layers[0].embeddings.numpy(), ours.layers[0].embeddings.numpy()
    )
    theirs.save_weights(tmp_path / "plain.weights.h5")
    loaded.load_weights(tmp_path / "plain.weights.h5")


def test_equal_seeds_give_equal_initial_values():
    def rows(seed):
        layer = Embedding(20, 4, "normal", seed=seed)
        layer.build()
        return layer.embeddings.numpy()

    np.testing.assert_array_equal(rows(5), rows(5))
    assert (rows(5) != rows(6)).any()
    same = Embedding.from_config(Embedding(20, 4, "normal", seed=5).get_config())
    same.build()
    np.testing.assert_array_equal(same.embeddings.numpy(), rows(5))


def test_saving_leaves_rows_on_the_servers(pixels, tmp_path):
    strategy = ServedStrategy(2)
    with strategy.scope():
        model = digit_model(Embedding(NUM_ROWS, DIM, name="words"))
    model.fit(pixels[0][:64], pixels[1][:64], verbose=0)
    expected = model.predict(pixels[0][:8], verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    assert path.stat().st_size < 200_000 < NUM_ROWS * DIM * 4 * 8
    with strategy.scope():
        loaded = keras.saving.load_model(path)
    assert loaded.layers[0].table_name == model.layers[0].table_name
    np.testing.assert_allclose(loaded.predict(pixels[0][:8], verbose=0), expected)
    assert loaded.layers[0].get_config()["input_dim"] == NUM_ROWS
    with pytest.raises(ValueError, match="had its rows on parameter servers"):
        keras.saving.load_model(path)
    plain = digit_model(keras.layers.Embedding(NUM_ROWS, DIM, name="words"))
    plain.save_weights(tmp_path / "plain.weights.h5")
    with pytest.raises(ValueError, match="cannot be set from saved weights"):
        model.load_weights(tmp_path / "plain.weights.h5")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embeddings_regularizer": "l2"}, "embeddings_regularizer needs the whole"),
        ({"embeddings_constraint": "non_neg"}, "embeddings_constraint needs the whole"),
        ({"lora_rank": 2}, "lora_rank needs the whole"),
        ({"dtype": "bfloat16"}, "got dtype='bfloat16'"),
        ({"embeddings_initializer": "glorot_uniform"}, "Use RandomUniform"),
        ({"weights": np.zeros((10, 2))}, "weights needs the whole"),
    ],
)
def test_options_that_need_the_whole_table_are_refused(options, message):
    with (
        ServedStrategy(1).scope(),
        pytest.raises((ValueError, TableError), match=message),
    ):
        Embedding(10, 2, name="words", **options).build()


def test_float_ids_that_cannot_tell_rows_apart_are_refused():
    with ServedStrategy(1).scope():
        layer = Embedding(2**24 + 1, 1, "zeros", name="words")
        with pytest.raises(ValueError, match="dtype='int32'"):
            layer(np.ones((2, 3), "float32"))


def test_a_layer_that_the_step_builds(pixels):
    strategy = ServedStrategy(2, keras.optimizers.SGD(0.01))
    with strategy.scope():
        layer = Embedding(NUM_ROWS, DIM, name="words", dtype="mixed_bfloat16")
        model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01)

    def step(x):
        with rx.GradientTape() as tape:
            loss = keras.ops.mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    data = strategy.experimental_distribute_dataset([pixels[0][:16]] * 4)
    losses = [float(strategy.reduce("mean", strategy.run(step, (x,)))) for x in data]
    assert losses[-1] < losses[0]
    assert layer.compute_dtype == "bfloat16"
    assert strategy.home.rows.tables["words"][0].version == 4
    assert not layer.anchor.numpy().any()


def test_outside_a_step_rows_can_be_looked_up():
    strategy = ServedStrategy(2)
    with strategy.scope():
        layer = Embedding(10, 2, name="words")
        rows = layer(np.array([[1, 2], [1, 9]]))
    expected = strategy.home.rows.whole(layer)[[1, 2, 1, 9]].reshape(2, 2, 2)
    np.testing.assert_array_equal(np.asarray(rows), expected)
    with pytest.raises(ValueError, match="id 10 at position 0"):
        layer(np.array([10]))
    with pytest.raises(AttributeError, match="no worker holds them all"):
        _ = layer.embeddings
    with pytest.raises(AttributeError, match="no worker holds them all"):
        layer.enable_lora(2)
