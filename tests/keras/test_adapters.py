"""Distributed datasets given to `fit`, `evaluate` and `predict`.

The same cases run on four replicas of one process and on two workers of two devices
each; the oracle is plain Keras with the same global batches.
"""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
import replicax.testing
from replicax.keras.adapters import (
    DistributedAdapter,
    adapter_of,
    fixed_number_of_batches,
)

_RNG = np.random.default_rng(11)
X = _RNG.normal(size=(48, 5)).astype("float32")
Y = _RNG.normal(size=(48, 1)).astype("float32")
WEIGHTS = _RNG.uniform(0.5, 2.0, size=48).astype("float32")


def trained(data, validation, predicted, **options):
    """The results of all methods that take data."""
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    history = model.fit(
        **data, validation_data=validation, epochs=2, verbose=0, **options
    )
    given = {"x": validation} if not isinstance(validation, tuple) else None
    evaluated = model.evaluate(
        **(given or {"x": validation[0], "y": validation[1], "batch_size": 8}),
        verbose=0,
    )
    return {
        "history": history.history,
        "weights": model.get_weights(),
        "evaluate": evaluated,
        "predict": model.predict(**predicted, verbose=0),
    }


def by_keras():
    """The oracle."""
    keras.utils.set_random_seed(1)
    return trained(
        {"x": X, "y": Y, "sample_weight": WEIGHTS, "batch_size": 8, "shuffle": False},
        (X[:16], Y[:16]),
        {"x": X, "batch_size": 8},
        validation_batch_size=8,
    )


def from_arrays(strategy):
    def distributed(*arrays):
        return strategy.experimental_distribute_dataset(arrays, batch_size=8)

    return trained(
        {"x": distributed(X, Y, WEIGHTS)},
        distributed(X[:16], Y[:16]),
        {"x": distributed(X)},
    )


def from_batches_that_are_no_tuples(strategy):
    model = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
    dataset = strategy.experimental_distribute_dataset(X, batch_size=8)
    return {"predict": model.predict(dataset, verbose=0)}


def from_a_function(strategy):
    """Batches for one replica each, the rows that it has of the global batch."""

    def per_replica(*arrays):
        def make(context):
            size = context.get_per_replica_batch_size(8)
            num_local = 4 // context.num_input_pipelines
            first = num_local * context.input_pipeline_id
            for start in range(0, len(arrays[0]), 8):
                for replica in range(first, first + num_local):
                    rows = slice(start + size * replica, start + size * (replica + 1))
                    yield tuple(array[rows] for array in arrays)

        return strategy.distribute_datasets_from_function(make)

    return trained(
        {"x": per_replica(X, Y, WEIGHTS)},
        per_replica(X[:16], Y[:16]),
        {"x": per_replica(X)},
    )


WAYS = [from_arrays, from_a_function]


def results_of(strategy):
    results = {}
    for case in [*WAYS, from_batches_that_are_no_tuples]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            results[case.__name__] = jax.tree.map(np.asarray, case(strategy))
    return results | {"padded": padded(strategy), "again": again(strategy)}


def padded(strategy):
    dataset = strategy.experimental_distribute_dataset(
        (X, Y), batch_size=8, remainder="pad"
    )
    try:
        fit_anything(strategy, dataset)
    except ValueError as error:
        return str(error)
    return "no error"


def again(strategy):
    """A last batch that the replicas cannot share is a step of every `fit`."""
    dataset = strategy.experimental_distribute_dataset((X[:14], Y[:14]), batch_size=8)
    return [fit_anything(strategy, dataset) for _ in range(2)]


def fit_anything(strategy, dataset):
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(dataset, verbose=0)
    return int(model.optimizer.iterations)


def workers_results():
    return results_of(rx.MultiWorkerMirroredStrategy())


@pytest.fixture(scope="module")
def workers():
    return list(
        replicax.testing.run(
            workers_results, num_workers=2, logical_devices=2, deadline_seconds=90
        ).returned.values()
    )


@pytest.fixture(scope="module")
def replicas():
    return results_of(rx.MirroredStrategy([f"cpu:{i}" for i in range(4)]))


def assert_equal_to_keras(actual):
    # float32 sums of four replicas' parts, in another order than over one batch.
    expected = jax.tree.map(np.asarray, by_keras())
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_one_process_is_as_keras(replicas, way):
    assert_equal_to_keras(replicas[way.__name__])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_two_workers_are_as_keras(workers, way):
    for result in workers:
        assert_equal_to_keras(result[way.__name__])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_all_have_all_predictions(workers, replicas):
    name = from_batches_that_are_no_tuples.__name__
    for result in [*workers, replicas]:
        assert result[name]["predict"].shape == (48, 2)
        np.testing.assert_allclose(
            result[name]["predict"], workers[0][name]["predict"], rtol=1e-5, atol=1e-6
        )


def assert_refused_and_trained_again(result):
    assert "remainder='pad' makes (batch, mask) pairs" in result["padded"]
    assert result["again"] == [2, 2]


def test_masks_are_refused_and_a_dataset_trains_again(replicas):
    assert_refused_and_trained_again(replicas)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_refuse_masks_and_train_again(workers):
    for result in workers:
        assert_refused_and_trained_again(result)


def test_only_distributed_datasets_get_an_adapter():
    strategy = rx.MirroredStrategy(["cpu:0"])
    dataset = strategy.experimental_distribute_dataset(X, batch_size=8)
    adapter = adapter_of(dataset)
    assert isinstance(adapter, DistributedAdapter)
    assert fixed_number_of_batches(adapter) is None
    assert adapter.num_batches is None
    assert fixed_number_of_batches(adapter_of(X, Y, batch_size=16)) == 3


@pytest.mark.parametrize("name", ["y", "sample_weight", "class_weight"])
def test_what_a_distributed_dataset_has_of_its_own_is_refused(name) -> None:
    strategy = rx.MirroredStrategy(["cpu:0"])
    dataset = strategy.experimental_distribute_dataset((X, Y), batch_size=8)
    with pytest.raises(ValueError, match=f"got {name} as well"):
        adapter_of(dataset, **{name: Y}, caller="fit")
