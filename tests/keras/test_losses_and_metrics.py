"""Losses and metrics of `compile` are those of the whole batch, on every strategy."""

import contextlib
import functools
from typing import Any

import keras
import numpy as np
import pytest
from tests.keras.loss_and_metric_tables import LOSSES, METRICS, output, targets
from tests.strategies.parity import STRATEGIES

import replicax as rx
import replicax.testing

# Keras' own, of its MeanIoU.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")


BATCH = 8
NUM_ROWS, NUM_OF_VALIDATION = 23, 22
"""The last batches have 7 and 6 rows: 3 or all of 4 replicas hold rows."""


def model_of(kind: str) -> tuple[Any, list[str]]:
    """A model with an output for each loss or metric; the kinds of their targets."""
    table = LOSSES if kind == "losses" else METRICS
    inputs = keras.Input((5,))
    x = keras.layers.Dense(8, "tanh", kernel_initializer="glorot_normal")(inputs)
    names = {name: f"out_{i}" for i, name in enumerate(table)}
    kinds = [entry[0] for entry in table.values()]
    outputs = [output(k, x, n) for k, n in zip(kinds, names.values(), strict=True)]
    model = keras.Model(inputs, outputs)
    items = [entry[1]() for entry in table.values()]
    optimizer = keras.optimizers.SGD(0.002)
    if kind == "losses":
        model.compile(optimizer, items)
    else:
        loss = ["mse" if k == "numbers" else None for k in kinds]
        model.compile(optimizer, loss, metrics=[[x] for x in items])
    return model, kinds


def compiled_model(strategy: Any, kind: str) -> tuple[Any, list[str]]:
    keras.utils.clear_session()  # Else metrics of the same name are numbered on.
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        return model_of(kind)


def data_of(kinds: list[str], num_rows: int) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 5)).astype("float32")
    return x, [targets(k, num_rows, rng) for k in kinds]


def with_weights(model: Any, logs: dict[str, Any]) -> dict[str, Any]:
    weights = enumerate(model.get_weights())
    return logs | {f"weight {i}": weight for i, weight in weights}


def results(strategy: Any, kind: str) -> dict[str, Any]:
    """The logs of `fit` and `evaluate`, and each output's kernel, by names of items."""
    model, kinds = compiled_model(strategy, kind)
    x, y = data_of(kinds, NUM_ROWS)
    small = slice(None, NUM_OF_VALIDATION)
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x[small], [t[small] for t in y]),
    ).history
    logs = {name: np.asarray(values) for name, values in history.items()}
    return with_weights(model, logs)


@functools.cache
def plain(kind: str) -> dict[str, Any]:
    return results(None, kind)


@pytest.mark.parametrize("kind", ["losses", "metrics"])
@pytest.mark.parametrize(
    "name", ["mirrored 2", "mirrored 4", "fully sharded", "central storage", "virtual"]
)
@pytest.mark.slow
def test_all_are_those_of_plain_keras(name: str, kind: str, assert_same: Any) -> None:
    assert_same(results(STRATEGIES[name](), kind), plain(kind))


def one_program(strategy: Any, kind: str) -> dict[str, Any]:
    """The same after two batches of 6 rows: losses of `fit`, metrics of `evaluate`."""
    model, kinds = compiled_model(strategy, kind)
    x, y = data_of(kinds, 12)
    options = {"batch_size": 6, "verbose": 0}
    if kind == "losses":
        logs = model.fit(x, y, shuffle=False, **options).history
    else:
        logs = model.evaluate(x, y, return_dict=True, **options)
    return with_weights(model, {n: np.asarray(value) for n, value in logs.items()})


@pytest.mark.parametrize("kind", ["losses", "metrics"])
def test_programs_are_those_of_plain_keras(kind: str, assert_same: Any) -> None:
    strategy = STRATEGIES["mirrored 4"]()
    assert_same(one_program(strategy, kind), one_program(None, kind))


def on_a_worker() -> Any:
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent))
    strategy = rx.MultiWorkerMirroredStrategy()
    return {kind: results(strategy, kind) for kind in ("losses", "metrics")}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_all_are_those_of_plain_keras_on_two_workers(assert_same: Any) -> None:
    outcomes = replicax.testing.run(
        on_a_worker, tasks={"worker": 2}, logical_devices=1, deadline_seconds=280
    )
    for outcome in outcomes.values():
        for kind in ("losses", "metrics"):
            assert_same(outcome.value[kind], plain(kind))


def test_the_tables_name_every_class() -> None:
    bases = {"Loss", "Metric", "MeanMetricWrapper", "Mean", "Sum"}
    for module, table, base in (
        (keras.losses, LOSSES, keras.losses.Loss),
        (keras.metrics, METRICS, keras.metrics.Metric),
    ):
        classes = {
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, base)
        }
        assert classes - bases <= set(table)
