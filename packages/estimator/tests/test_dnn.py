"""Canned estimators with hidden layers, alone and with a linear model."""

import keras
import numpy as np
import pytest
from sklearn.datasets import load_diabetes
from tests.conftest import mirrored

import replicax as rx
from replicax_estimator import feature_column as fc

E = rx.estimator
X = fc.numeric_column("x", 2)
COLOR = fc.categorical_column_with_vocabulary_list("color", ["red", "green"])


def values_of(estimator, prefix="") -> dict[str, np.ndarray]:
    return {
        name: estimator.get_variable_value(name)
        for name in estimator.get_variable_names()
        if name.startswith(prefix)
    }


def test_two_replicas_train_like_one_with_both_batches(tmp_path) -> None:
    x, y = load_diabetes(return_X_y=True)
    features = {"x": x[:96, :2] * 20, "w": np.abs(x[:96, 2]) * 40}
    values = {}
    for n in (1, 2):
        estimator = E.DNNRegressor(
            [5],
            [X],
            tmp_path / str(n),
            weight_column="w",
            optimizer="SGD",
            activation_fn=keras.ops.tanh,
            config=E.RunConfig(train_distribute=mirrored(n), tf_random_seed=1),
        )
        input_fn = E.numpy_input_fn(features, y[:96] / 100, 16 // n, shuffle=False)
        estimator.train(input_fn)
        assert estimator.get_variable_value("global_step") == 6
        values[n] = values_of(estimator, "dnn/")
    assert sorted(values[1]) == [
        "dnn/hiddenlayer_0/bias",
        "dnn/hiddenlayer_0/kernel",
        "dnn/logits/bias",
        "dnn/logits/kernel",
    ]
    assert np.abs(values[1]["dnn/logits/bias"]).max() > 0.1
    for name, value in values[1].items():
        # The order of float32 sums differs.
        np.testing.assert_allclose(values[2][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_and_batch_norm(tmp_path) -> None:
    rng = np.random.default_rng(0)
    features = {"x": rng.normal(2.0, 3.0, (64, 2))}
    labels = rng.integers(0, 3, 64)
    config = E.RunConfig(
        train_distribute=mirrored(2), eval_distribute=mirrored(2), tf_random_seed=0
    )
    estimator = E.DNNClassifier(
        [4, 3], [X], tmp_path, n_classes=3, dropout=0.5, batch_norm=True, config=config
    )
    estimator.train(lambda: (features, labels), steps=4)
    values = values_of(estimator, "dnn/hiddenlayer_1/batchnorm_1/")
    assert [name.rpartition("/")[2] for name in values] == [
        "beta",
        "gamma",
        "moving_mean",
        "moving_variance",
    ]
    assert np.abs(values["dnn/hiddenlayer_1/batchnorm_1/moving_mean"]).max() > 0
    # Evaluation and prediction use no dropout and no batch statistics.
    first, second = (estimator.evaluate(lambda: (features, labels)) for _ in range(2))
    assert first == second
    half = {"x": features["x"][:7]}
    whole = np.stack([p["probabilities"] for p in estimator.predict(lambda: features)])
    part = [p["probabilities"] for p in estimator.predict(lambda: half)]
    np.testing.assert_allclose(part, whole[:7], rtol=1e-6)
    loss = -np.log(whole[np.arange(64), labels]).mean()
    assert first["average_loss"] == pytest.approx(loss, rel=1e-5)


def combined(folder, kind=E.DNNLinearCombinedRegressor, **kwargs):
    given = {
        "linear_feature_columns": [COLOR],
        "dnn_feature_columns": [X, fc.embedding_column(COLOR, 2)],
        "dnn_hidden_units": [3],
        "config": E.RunConfig(tf_random_seed=0),
    }
    return kind(folder, **(given | kwargs))


BATCH = (
    {"x": np.arange(8.0).reshape(4, 2), "color": ["red", "green", "", "red"]},
    [1.0, 2.0, 3.0, 4.0],
)


def test_both_parts_have_their_own_optimizer(tmp_path) -> None:
    """If the learning rate of one part is 0, only the other part's variables change."""
    for part, other in (("linear", "dnn"), ("dnn", "linear")):
        rates = {part: 0.01, other: 0.0}
        values = []
        for steps in (1, 3):
            sgds = {f"{p}_optimizer": keras.optimizers.SGD(r) for p, r in rates.items()}
            folder = tmp_path / part
            # The optimizers are named sgd_1, ..., but the checkpoint has other names.
            estimator = combined(folder, dnn_activation_fn="tanh", **sgds)
            values.append(values_of(estimator.train(lambda: BATCH, steps=steps)))
        first, last = values
        for name, value in first.items():
            if name.startswith(("linear/", "dnn/")):
                assert (value != last[name]).any() == name.startswith(part + "/"), name


def test_logits_are_the_sum_of_the_parts(tmp_path) -> None:
    estimator = combined(
        tmp_path, linear_optimizer="Adam", dnn_optimizer="Adam", dnn_activation_fn=None
    ).train(lambda: BATCH, steps=5)
    values = values_of(estimator)
    table = values["dnn/input_layer/input_layer_color_embedding/embeddings"]
    ids = [0, 1, None, 0]
    vectors = [np.zeros(2) if i is None else table[i] for i in ids]
    # Columns are in the order of their names: color_embedding, x.
    net = np.concatenate([vectors, BATCH[0]["x"]], axis=1)
    for layer in ("hiddenlayer_0", "logits"):
        net = net @ values[f"dnn/{layer}/kernel"] + values[f"dnn/{layer}/bias"]
    weights = values["linear/linear_model/color/weights"]
    net += [np.zeros(1) if i is None else weights[i] for i in ids]
    net += values["linear/linear_model/bias_weights"]
    result = [p["predictions"] for p in estimator.predict(lambda: BATCH[0])]
    np.testing.assert_allclose(result, net, rtol=1e-5)


def test_a_combined_model_may_have_one_part(tmp_path) -> None:
    batch = BATCH[0], np.array(["no", "yes", "yes", "no"])
    estimator = combined(
        tmp_path,
        E.DNNLinearCombinedClassifier,
        linear_feature_columns=None,
        label_vocabulary=["no", "yes"],
    ).train(lambda: batch, steps=2)
    assert not values_of(estimator, "linear/")
    assert values_of(estimator, "adagrad/dnn_logits")
    assert estimator.evaluate(lambda: batch)["global_step"] == 2
    estimator = combined(tmp_path, dnn_feature_columns=None, dnn_hidden_units=None)
    assert [column.name for column in estimator.preprocessor.columns] == ["color"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dnn_hidden_units": []}, r"dnn_hidden_units: .* got \[\]"),
        ({"dnn_hidden_units": None}, "dnn_hidden_units: .* got None"),
        ({"dnn_feature_columns": None}, r"dnn_hidden_units=\[3\] were given"),
        ({"dnn_feature_columns": [COLOR]}, "columns must be dense"),
        (
            {
                "dnn_feature_columns": None,
                "dnn_hidden_units": None,
                "linear_feature_columns": [],
            },
            "got neither linear_feature_columns nor",
        ),
    ],
)
def test_wrong_arguments(kwargs, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        combined(tmp_path, **kwargs)
