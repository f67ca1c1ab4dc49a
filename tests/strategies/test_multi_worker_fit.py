"""`fit`, `evaluate` and `predict` of two workers give what one process gives.

Two workers of two devices each run every case below, in one cluster. The oracle is the
same case in the process of the tests: plain Keras on the global batches, or a
`MirroredStrategy` of four replicas for what depends on the replicas themselves (dropout
masks, batch statistics).
"""

import contextlib
import functools

import grain
import jax
import keras
import numpy as np
import optax
import pytest
import scipy.sparse
from keras import layers
from tests.keras.masked_cases import in_loops
from tests.strategies import parity

import replicax as rx
import replicax.testing

pytestmark = [
    pytest.mark.multiprocess,
    # Keras says so at the end of a dataset of unknown length.
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(58, 6)).astype("float32")
Y = _RNG.integers(0, 3, size=58).astype("int32")
WEIGHTS = _RNG.uniform(0.2, 2.0, size=58).astype("float32")


def classifier(optimizer, *hidden, **options):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            *hidden,
            layers.Dense(3),
        ]
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def outcome(model, history):
    return {
        "weights": model.get_weights(),
        "optimizer": [np.asarray(v) for v in model.optimizer.variables],
        "history": history.history,
    }


def adam_with_all_that_fit_takes():
    """Batches of 12 on 4 replicas, and a last one of 10 that does not divide."""
    model = classifier(keras.optimizers.Adam(0.01), weighted_metrics=["accuracy"])
    history = model.fit(
        X,
        Y,
        batch_size=12,
        epochs=2,
        sample_weight=WEIGHTS,
        # A batch of 9, 1 more than 4 replicas can share, and one of 4.
        validation_data=(X[:13], Y[:13], WEIGHTS[:13]),
        validation_batch_size=9,
        verbose=0,
    )
    return outcome(model, history) | {
        "evaluate": model.evaluate(
            X[:22], Y[:22], batch_size=9, sample_weight=WEIGHTS[:22], verbose=0
        ),
        # The last batch has fewer rows than there are replicas.
        "predict": model.predict(X[:30], batch_size=9, verbose=0),
    }


def momentum_with_several_steps_per_execution():
    """Two executions of three steps, and a batch of two rows by itself."""
    model = classifier(
        keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), steps_per_execution=3
    )
    weight = {0: 0.5, 1: 2.0, 2: 1.0}
    x, y = X[:50], Y[:50]
    history = model.fit(x, y, batch_size=8, epochs=2, class_weight=weight, verbose=0)
    return outcome(model, history) | {
        "predict": model.predict(x, batch_size=8, verbose=0)
    }


def optimizer_of_optax():
    model = classifier(rx.OptaxOptimizer(optax.adam(0.01)))
    return outcome(model, model.fit(X, Y, batch_size=32, shuffle=False, verbose=0))


def synchronized_batch_normalization():
    """Statistics of the global batch, as one process has them."""
    model = classifier("sgd", layers.BatchNormalization(synchronized=True))
    history = model.fit(X[:56], Y[:56], batch_size=8, epochs=2, verbose=0)
    return outcome(model, history)


def validation_split_and_single_batches():
    model = classifier(keras.optimizers.SGD(0.1))
    twice = [keras.metrics.SparseTopKCategoricalAccuracy(2)]
    model.compile(model.optimizer, model.loss, metrics=twice, weighted_metrics=twice)
    x, y = X[:50], Y[:50]
    history = model.fit(x, y, batch_size=10, validation_split=0.4, verbose=0)
    return outcome(model, history) | {
        "train_on_batch": model.train_on_batch(x[:10], y[:10], return_dict=True),
        "test_on_batch": model.test_on_batch(x[:10], y[:10], return_dict=True),
        "predict_on_batch": model.predict_on_batch(x[:6]),
        "weights at last": model.get_weights(),
    }


def uneven_batches_of_a_distributed_dataset():
    """Batches of 9 on 4 replicas, and a last one of 4; also in a custom loop."""
    strategy = rx.get_strategy()
    data = strategy.experimental_distribute_dataset((X, Y), batch_size=9)
    model = classifier(keras.optimizers.SGD(0.1, momentum=0.9))
    history = model.fit(data, epochs=2, verbose=0)
    found = {"evaluate": model.evaluate(data, verbose=0)}
    example_loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def step(x, y):
        with rx.GradientTape() as tape:
            losses = example_loss(y, model(x, training=True))
            loss = rx.compute_average_loss(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(grads, model.trainable_variables)
        return loss, losses

    for number, batch in enumerate(data):
        loss, losses = strategy.run(step, args=batch)
        found[f"loss {number}"] = strategy.reduce("sum", loss)
        found[f"losses {number}"] = strategy.gather(losses, axis=0)
    return outcome(model, history) | found


class Batches(keras.utils.PyDataset):
    """Four batches of 12 rows."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = slice(12 * index, 12 * index + 12)
        return X[rows], Y[rows]


def batches():
    for index in range(len(Batches())):
        yield Batches()[index]


def endless_batches():
    while True:
        yield from batches()


def a_shuffled_py_dataset():
    model = classifier("sgd")
    return outcome(model, model.fit(Batches(), epochs=2, verbose=0))


def a_grain_dataset():
    rows = grain.MapDataset.range(48).seed(5).shuffle().batch(12)
    model = classifier("sgd")
    batched = rows.map(lambda i: (X[i], Y[i]))
    history = model.fit(batched, epochs=2, shuffle=False, verbose=0)
    return outcome(model, history)


def generators():
    model = classifier("sgd")
    model.fit(batches(), shuffle=False, verbose=0)
    history = model.fit(
        endless_batches(), steps_per_epoch=3, epochs=3, shuffle=False, verbose=0
    )
    return outcome(model, history) | {
        "evaluate": model.evaluate(batches(), verbose=0),
        "predict": model.predict(batches(), verbose=0),
    }


def masked_and_weighted_steps():
    return in_loops("masked, weighted steps")


# Rows with few entries, then rows without any, then full ones.
SPARSE = scipy.sparse.csr_array(
    X
    * (np.arange(58)[:, None] // 12 > 3.5 * np.abs(X))
    * (np.arange(58) // 8 != 2)[:, None]
)


def sparse_inputs():
    """The last batch, of 2 rows, and those of 9 go to some of the replicas only."""

    def batches():
        for start in range(0, 48, 12):
            yield SPARSE[start : start + 12], Y[start : start + 12]

    model = classifier("sgd")
    history = model.fit(SPARSE, Y, batch_size=8, epochs=2, verbose=0)
    model.fit(batches(), shuffle=False, verbose=0)
    return outcome(model, history) | {
        "evaluate": model.evaluate(SPARSE, Y, batch_size=9, verbose=0),
        "predict": model.predict(batches(), verbose=0),
    }


def sparse_data_of_each_worker():
    """Of which replicas have different numbers of entries, and workers do not know."""
    strategy = rx.get_strategy()
    ones = np.ones(6, "float32")

    def data(context):
        for number in range(16):
            owner = number % 4 // (4 // context.num_input_pipelines)
            if owner == context.input_pipeline_id:
                rows = slice(3 * number, 3 * number + 3)
                yield SPARSE[rows], Y[rows]

    dataset = strategy.distribute_datasets_from_function(data)
    sums = []
    for x, _ in dataset:
        out = strategy.run(lambda x: (x @ ones, x.todense()), (x,))
        gathered = strategy.gather(out[0], axis=0)
        total = strategy.reduce("sum", out[1], axis=None)
        sums += [gathered, total, strategy.gather(out[1], axis=0)]
    model = classifier(keras.optimizers.SGD(0.1))
    history = model.fit(dataset, epochs=2, verbose=0)
    keys = jax.random.split(jax.random.key(0), 8)
    (part,) = strategy.experimental_distribute_dataset(keys, batch_size=8)
    drawn = strategy.run(
        lambda keys, key: jax.vmap(jax.random.uniform)(keys) + jax.random.uniform(key),
        (part, keys[0]),
    )
    sums.append(strategy.gather(drawn, axis=0))
    value = strategy.run(lambda: np.ones((2, 6), "float32"))
    return outcome(model, history) | {"sums": sums, "called": model(value)}


def dropout_and_replica_statistics():
    model = classifier("sgd", layers.BatchNormalization(), layers.Dropout(0.5))
    history = model.fit(X[:56], Y[:56], batch_size=8, epochs=2, verbose=0)
    return outcome(model, history)


AS_ONE_DEVICE = {
    adam_with_all_that_fit_takes: False,
    synchronized_batch_normalization: False,
    optimizer_of_optax: False,
    validation_split_and_single_batches: False,
    a_shuffled_py_dataset: True,
    generators: True,
    masked_and_weighted_steps: True,
    momentum_with_several_steps_per_execution: True,
    sparse_inputs: True,
}
AS_FOUR_REPLICAS = {
    dropout_and_replica_statistics: False,
    uneven_batches_of_a_distributed_dataset: False,
    sparse_data_of_each_worker: True,
    a_grain_dataset: True,
}
"""Cases, and whether each is slow. All slow cases share one cluster, as do others."""
CASES = AS_ONE_DEVICE | AS_FOUR_REPLICAS
SOME = [adam_with_all_that_fit_takes, dropout_and_replica_statistics]


def result_of(case, strategy=None):
    """A case's result, with the random numbers that all have."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        return jax.tree.map(np.asarray, case())


def all_results(is_slow):
    strategy = rx.MultiWorkerMirroredStrategy()
    cases = [case for case in CASES if CASES[case] == is_slow]
    results = {case.__name__: result_of(case, strategy) for case in cases}
    strategy.check_replicas()
    if is_slow:
        operation = rx.HierarchicalCopyAllReduce()
        other = rx.MultiWorkerMirroredStrategy(cross_device_ops=operation)
        results["hierarchical"] = result_of(synchronized_batch_normalization, other)
    return results | {"replicas": strategy.num_replicas_in_sync}


@functools.cache
def workers(is_slow):
    """What each of the two workers returned."""
    # Here too, Keras takes `synchronized=True` once there was a strategy.
    rx.MirroredStrategy(["cpu:0"])
    results = replicax.testing.run(
        all_results,
        num_workers=2,
        args=(is_slow,),
        logical_devices=2,
        deadline_seconds=180,
    )
    return list(results.returned.values())


def some_results():
    strategy = rx.MultiWorkerMirroredStrategy()
    return [result_of(case, strategy) for case in SOME]


# float32 sums over four replicas in another order than over one batch: about 1e-7 of a
# gradient each step. Adam divides by gradients' sizes, which makes most of it.
assert_same = functools.partial(parity.assert_same, rtol=1e-4, atol=1e-5)
assert_identical = functools.partial(parity.assert_same, rtol=0, atol=0)


def each(cases):
    """Parameters: a case, and whether it is slow."""
    return pytest.mark.parametrize(
        ("case", "is_slow"),
        [
            pytest.param(
                case,
                is_slow,
                id=case.__name__,
                marks=[pytest.mark.slow] if is_slow else [],
            )
            for case, is_slow in cases.items()
        ],
    )


@each(AS_ONE_DEVICE)
def test_as_one_process(case, is_slow):
    assert_same(workers(is_slow)[0][case.__name__], result_of(case))


@each(AS_FOUR_REPLICAS)
def test_as_four_replicas_of_one_process(case, is_slow):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    assert_same(workers(is_slow)[0][case.__name__], result_of(case, strategy))


@pytest.mark.slow
def test_sums_in_two_stages():
    expected = result_of(synchronized_batch_normalization)
    assert_same(workers(True)[0]["hierarchical"], expected)


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_agree_bit_by_bit(is_slow):
    # Both see the results of the same sums: not one bit may differ.
    first, second = workers(is_slow)
    assert first["replicas"] == 4
    for name in first:
        assert_identical(second[name], first[name])


@each({case: CASES[case] for case in CASES if case is not masked_and_weighted_steps})
def test_the_cases_train(case, is_slow):
    """Otherwise equality would prove little."""
    result = workers(is_slow)[0][case.__name__]
    keras.utils.set_random_seed(1)
    at_first = keras.Sequential([keras.Input((6,)), layers.Dense(8)]).get_weights()
    assert np.abs(result["weights"][0] - at_first[0]).max() > 1e-3
    assert all(np.isfinite(loss) for loss in result["history"]["loss"])


@pytest.mark.slow
def test_four_workers_of_one_device():
    """The same replicas, divided otherwise between processes."""
    results = replicax.testing.run(some_results, num_workers=4, deadline_seconds=120)
    for result in results.returned.values():
        for case, actual in zip(SOME, result, strict=True):
            assert_same(actual, workers(False)[0][case.__name__])
