"""Linear canned estimators, and their optimizers."""

import keras
import numpy as np
import pytest
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from tests.conftest import mirrored

import replicax as rx
from replicax_estimator import feature_column as fc
from replicax_estimator.canned import optimizer_maker
from replicax_estimator.linear import linear_part

E = rx.estimator
COLORS = ["red", "green", "blue"]


def test_diabetes_as_least_squares(tmp_path) -> None:
    x, y = load_diabetes(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype("float32")
    exact = LinearRegression().fit(x, y)
    least = np.mean((exact.predict(x) - y) ** 2)
    input_fn = E.numpy_input_fn({"x": x}, y, 34, 60, shuffle=True, seed=0)
    config = E.RunConfig(train_distribute=mirrored(2), eval_distribute=mirrored(2))
    estimator = E.LinearRegressor(
        [fc.numeric_column("x", 10)],
        tmp_path,
        optimizer=keras.optimizers.SGD(0.02),
        config=config,
    )
    all_once = E.numpy_input_fn({"x": x}, y, 34, shuffle=False)
    results = estimator.train(input_fn).evaluate(all_once)
    assert least <= results["average_loss"] * (1 + 1e-5)
    assert results["average_loss"] == pytest.approx(least, rel=0.02)
    bias = estimator.get_variable_value("linear/linear_model/bias_weights")
    assert bias[0] == pytest.approx(exact.intercept_, rel=0.02)


def test_optimizers() -> None:
    for name in ("SGD", "adagrad", "ADAM", "RMSProp"):
        result = optimizer_maker(name, 0.2)()
        assert type(result).__name__.lower() == name.lower()
        assert float(result.learning_rate) == pytest.approx(0.2)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    original = keras.optimizers.SGD(schedule, momentum=0.9, name="mine")
    make = optimizer_maker(original, 0.2)
    result, again = make(), make()
    assert len({id(original), id(result), id(again)}) == 3
    assert result.momentum == 0.9
    assert (
        result.get_config()["learning_rate"] == original.get_config()["learning_rate"]
    )
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5))
    result = optimizer_maker(scaled, 0.2)()
    assert float(result.inner_optimizer.learning_rate) == 0.5
    assert type(optimizer_maker(keras.optimizers.Nadam, 0.2)()).__name__ == "Nadam"


def test_wrong_optimizers() -> None:
    with pytest.raises(ValueError, match="Momentum"):  # From Keras.
        optimizer_maker("Momentum", 0.2)
    with pytest.raises(TypeError, match=r"dnn_optimizer: must be .* got 3"):
        optimizer_maker(3, 0.2, "dnn_optimizer")


def test_default_optimizers() -> None:
    """Linear models of many columns get smaller steps."""

    def default(part) -> tuple[str, float]:
        result = part.optimizer()
        return type(result).__name__, float(result.learning_rate)

    columns = [fc.numeric_column(f"x{i}") for i in range(100)]
    few, many = linear_part(columns[:9], None, "sum"), linear_part(columns, None, "sum")
    assert default(few) == ("Ftrl", pytest.approx(0.2))
    assert default(many) == ("Ftrl", pytest.approx(0.1))
    named = linear_part(columns, "Ftrl", "sum")
    assert default(named) == ("Ftrl", pytest.approx(0.2))


def test_examples_without_weight_count_nothing(tmp_path) -> None:
    column = fc.numeric_column("x")
    estimator = E.LinearClassifier([column], tmp_path, weight_column="w")
    x, y = np.arange(4.0), np.array([0, 1, 1, 1])
    estimator.train(lambda: ({"x": x, "w": np.ones(4)}, y), steps=1)
    results = estimator.evaluate(lambda: ({"x": x, "w": np.zeros(4)}, y))
    assert results.pop("global_step") == 1
    assert set(results.values()) == {0.0}
