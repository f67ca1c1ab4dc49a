"""Sparse batches in `fit`, `evaluate`, `predict` and the calls of one batch.

Plain Keras on dense arrays is the oracle.
"""

import jax
import keras
import numpy as np
import pytest
import scipy.sparse
from jax import monitoring
from jax.experimental import sparse
from keras import layers

# Keras says so at the end of a generator.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

NUM, WIDTH, BATCH = 21, 6, 4


def random_rows():
    """Rows with few entries, some rows without any: `float32[21, 6]`."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(NUM, WIDTH)) * (rng.random((NUM, WIDTH)) < 0.3)
    rows[4:8] = 0  # All of the second batch.
    return rows.astype("float32")


X = random_rows()
Y = np.random.default_rng(1).normal(size=(NUM, 2)).astype("float32")

KINDS = {
    "csr": scipy.sparse.csr_matrix,
    "bcoo": sparse.BCOO.fromdense,
}


CSR = KINDS["csr"](X)


def model_of(width=WIDTH, **options):
    model = keras.Sequential(
        [
            keras.Input((width,), sparse=True),
            layers.Dense(3, activation="tanh"),
            layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse", metrics=["mae"], **options)
    return model


def fit_evaluate_predict(x, **options):
    model = model_of(**options)
    history = model.fit(x, Y, batch_size=BATCH, epochs=2, verbose=0)
    return {
        "history": history.history,
        "evaluate": model.evaluate(x, Y, batch_size=BATCH, verbose=0),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
        "weights": model.get_weights(),
    }


@pytest.fixture(scope="module")
def dense_on_one_device():
    keras.utils.set_random_seed(1)
    return jax.tree.map(np.asarray, fit_evaluate_predict(X))


@pytest.mark.slow(but=["csr-4"])
@pytest.mark.parametrize(
    ("kind", "num_replicas"), [("csr", 1), ("csr", 4), ("bcoo", 2)]
)
def test_as_dense_on_one_device(
    outcome, assert_same, dense_on_one_device, kind, num_replicas
):
    """The last batch, of one row, goes to one replica; shuffled, as by default."""
    actual = outcome(lambda: fit_evaluate_predict(KINDS[kind](X)), num_replicas)
    assert_same(actual, dense_on_one_device)


@pytest.mark.slow
def test_several_steps_per_execution(outcome, assert_same, dense_on_one_device):
    actual = outcome(lambda: fit_evaluate_predict(CSR, steps_per_execution=2), 2)
    assert_same(actual, dense_on_one_device)


@pytest.mark.slow
def test_as_many_entries_as_rows(outcome, assert_same):
    """Entries cut like rows have the right shapes then, and the wrong places."""
    x = np.zeros((8, WIDTH), "float32")
    x[[0, 0, 0, 3, 3, 5, 7, 7], [0, 1, 2, 0, 5, 1, 3, 4]] = np.arange(1.0, 9.0)
    assert sparse.BCOO.fromdense(x).nse == len(x)

    def work(x):
        model = model_of()
        losses = [model.train_on_batch(x, Y[:8])[0] for _ in range(2)]
        return losses, model.predict_on_batch(x), model.get_weights()

    expected = outcome(lambda: work(x), 0)
    assert_same(outcome(lambda: work(sparse.BCOO.fromdense(x)), 2), expected)


@pytest.mark.slow(but=["csr"])
@pytest.mark.parametrize("kind", ["csr", "bcoo"])
def test_single_batches(outcome, assert_same, kind):
    """Of 6 rows on 4 replicas, which 3 of them share."""

    def work(x):
        model = model_of()
        return {
            "train": model.train_on_batch(x, Y[:6], return_dict=True),
            "test": model.test_on_batch(x, Y[:6], return_dict=True),
            "predict": model.predict_on_batch(x),
        }

    expected = outcome(lambda: work(X[:6]), 0)
    assert_same(outcome(lambda: work(KINDS[kind](X[:6])), 4), expected)


class Batches(keras.utils.PyDataset):
    """Sparse batches with more entries from one to the next."""

    def __len__(self):
        return NUM // BATCH

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return scipy.sparse.csr_matrix(X[rows]), Y[rows]


@pytest.mark.slow
def test_datasets_of_sparse_batches(outcome, assert_same):
    def work(is_dense):
        def batches():
            for x, y in (Batches()[i] for i in range(len(Batches()))):
                yield (x.toarray() if is_dense else x), y

        model = model_of()
        model.fit(batches(), shuffle=False, verbose=0)
        model.fit(batches() if is_dense else Batches(), shuffle=False, verbose=0)
        scores = model.evaluate(batches(), verbose=0)
        return scores, model.predict(batches(), verbose=0), model.get_weights()

    assert_same(outcome(lambda: work(False), 2), outcome(lambda: work(True), 0))


def test_dense_and_sparse_inputs_together(outcome, assert_same):
    def work(kind):
        text = keras.Input((WIDTH,), sparse=True, name="text")
        image = keras.Input((2,), name="image")
        hidden = layers.Dense(3, activation="tanh")(text)
        out = layers.Dense(2)(layers.Concatenate()([hidden, image]))
        model = keras.Model({"text": text, "image": image}, out)
        model.compile("sgd", "mse")
        x = {"text": KINDS[kind](X) if kind else X, "image": Y[::-1].copy()}
        weights = np.linspace(0.5, 2, NUM)
        history = model.fit(
            x, Y, batch_size=8, sample_weight=weights, validation_split=0.3, verbose=0
        )
        return history.history, model.predict(x, batch_size=8, verbose=0)

    expected = outcome(lambda: work(None), 0)
    assert_same(outcome(lambda: work("csr"), 4), expected)


def test_few_programs_for_many_numbers_of_entries(strategy_of):
    """Room for entries grows by powers of two; each batch has another number."""
    rng = np.random.default_rng(0)
    dense = [rng.random((8, 40)) * (rng.random((8, 40)) < 0.3) for _ in range(12)]
    batches = [scipy.sparse.csr_matrix(x.astype("float32")) for x in dense]
    assert len({x.nnz for x in batches}) > 6
    with strategy_of(2).scope():
        model = model_of(40)
    model.fit(((x, Y[:8]) for x in batches[:1]), shuffle=False, verbose=0)
    compiled = []
    monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else 0
    )
    try:
        model.fit(((x, Y[:8]) for x in batches), shuffle=False, verbose=0)
    finally:
        monitoring.clear_event_listeners()
    assert len(compiled) <= 2


def test_replicas_see_a_bcoo(strategy_of):
    seen = []

    class Seeing(keras.Model):
        def call(self, x):
            seen.append((type(x), x.shape, x.n_batch))
            return x @ np.ones((WIDTH, 2), "float32")

    with strategy_of(2).scope():
        model = Seeing()
    out = model.predict(scipy.sparse.csr_array(X[:8]), batch_size=8, verbose=0)
    np.testing.assert_allclose(out[:, 0], X[:8].sum(1), rtol=1e-5)
    assert (sparse.BCOO, (4, WIDTH), 0) in seen


def test_sparse_predictions_are_refused(strategy_of):
    with strategy_of(2).scope():
        inputs = keras.Input((WIDTH,), sparse=True)
        model = keras.Model(inputs, layers.Lambda(lambda x: x * 2.0)(inputs))
    with pytest.raises(TypeError, match=r"got BCOO float32\[2, 6\].*todense"):
        model.predict(sparse.BCOO.fromdense(X[:4]), verbose=0)


def test_gradients_that_are_sparse(strategy_of):
    """`optimizer.apply` takes them, as in plain Keras."""
    strategy = strategy_of(2)
    with strategy.scope():
        weight = keras.Variable(np.zeros((3, 2), "float32"))
        optimizer = keras.optimizers.SGD(1.0)
    rows = np.float32([[1, 0], [0, 0], [0, 2]])
    strategy.run(
        lambda: optimizer.apply([sparse.BCOO.fromdense(rows, nse=2)], [weight])
    )
    np.testing.assert_array_equal(jax.device_get(weight.value), -2 * rows)
