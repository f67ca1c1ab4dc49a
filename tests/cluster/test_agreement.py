"""Workers that do not run the same program find out before they run it."""

import time

import numpy as np
import pytest

from replicax.testing import run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]


def find_all_differences() -> dict[str, tuple[str, float]]:
    """One difference after the other: the message, and the seconds until it came."""
    import keras

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    is_wrong = strategy.task_id == 1
    rows = np.ones((4, 3), "float32")

    def model_of(units: int, optimizer: str) -> keras.Model:
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])
            model.compile(optimizer, "mse")
        return model

    def fit(units: int = 1, optimizer: str = "sgd", batch_size: int = 4) -> None:
        model = model_of(units, optimizer)
        target = np.ones((4, 1), "float32")
        model.fit(rows, target, batch_size=batch_size, verbose=0)

    def square(x):
        return (x * x).sum()

    def cube(x):
        return (x * x * x).sum()

    def other_versions() -> None:
        version = keras.__version__
        keras.__version__ = "2.0" if is_wrong else version
        try:
            strategy.run(square, args=(rows,))
        finally:
            keras.__version__ = version

    factor = 3.0 if is_wrong else 2.0
    attempts = {
        "model": lambda: fit(units=2 if is_wrong else 1),
        "optimizer": lambda: fit(optimizer="adam" if is_wrong else "sgd"),
        "batch": lambda: strategy.run(square, args=(rows[: 3 if is_wrong else 4],)),
        "function": lambda: strategy.run(cube if is_wrong else square, args=(rows,)),
        "constant": lambda: strategy.run(lambda x: (x * factor).sum(), args=(rows,)),
        "versions": other_versions,
    }
    found = {}
    for name, attempt in attempts.items():
        start = time.monotonic()
        with pytest.raises(rx.ClusterMismatchError) as caught:
            attempt()
        found[name] = (str(caught.value), time.monotonic() - start)
    # The workers are together still: what is the same runs.
    strategy.run(square, args=(rows,))
    return found


def test_each_difference_is_named_on_all_workers() -> None:
    results = run(find_all_differences, num_workers=2, deadline_seconds=140)
    first, second = results.returned.values()
    for name in first.keys() | second.keys():  # Each names its own function first.
        told = [values[name][0].partition("): ")[2] for values in (first, second)]
        assert told[0] == told[1] != ""
    for name, (text, seconds) in [*first.items(), *second.items()]:
        assert seconds < 10, name
        assert text.startswith("the workers differ in the program of ")
        assert "on worker:0 and" in text
        assert "on worker:1. All workers must run the same script" in text
    texts = {name: text for name, (text, _) in first.items()}
    assert "float32[3, 1]' on worker:0 and" in texts["model"]
    assert "float32[3, 2]' on worker:1" in texts["model"]
    assert "the variables, entry" in texts["optimizer"]
    assert "adam" in texts["optimizer"]
    assert "the arguments' shapes, entry 0 is 'float32[4, 3]' on" in texts["batch"]
    assert "'float32[3, 3]' on worker:1" in texts["batch"]
    assert "square" in texts["function"]
    assert "cube" in texts["function"]
    assert "the compiled program (its digest)" in texts["constant"]
    assert "versions, keras is" in texts["versions"]
    assert "'2.0' on worker:1" in texts["versions"]
