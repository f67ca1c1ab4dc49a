"""Saved models: export, load and call."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax_estimator import (
    Estimator,
    EstimatorSpec,
    ModeKeys,
    RunConfig,
    build_raw_serving_input_receiver_fn,
    load_saved_model,
)

# A saved model is another program, in which XLA may order sums differently.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

MODEL = '''
"""A model whose module no other process can import."""

import keras

from replicax_estimator import EstimatorSpec, ModeKeys


def model_fn(features, labels, mode):
    training = mode == ModeKeys.TRAIN
    day = keras.layers.Embedding(7, 4)(features["day"])
    x = keras.ops.concatenate([features["x"], day], axis=1)
    x = keras.layers.Dense(8, activation="relu", dtype="bfloat16")(x)
    x = keras.layers.BatchNormalization(momentum=0.5)(x, training=training)
    hidden = keras.layers.Dropout(0.5)(x, training=training)
    logits = keras.layers.Dense(3, dtype="float32", name="file")(hidden)
    predictions = {"logits": logits, "class": keras.ops.argmax(logits, axis=1)}
    if mode == ModeKeys.PREDICT:
        exported = {"hidden": hidden, "twice": {"a": logits, "b": 2 * logits}}
        return EstimatorSpec(mode, predictions=predictions, export_outputs=exported)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, logits)
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.Adam(0.01))
'''


def examples(num_rows: int = 12) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 3)).astype("float32")
    day = rng.integers(0, 7, num_rows).astype("int32")
    return {"x": x, "day": day}, rng.integers(0, 3, num_rows).astype("int32")


def trained(folder: Path, model_fn: Any, batch: Any, steps: int = 3) -> Estimator:
    estimator = Estimator(model_fn, folder, RunConfig(tf_random_seed=1))
    return estimator.train(lambda: batch, steps=steps)


def predicted(estimator: Estimator, features: Any, **kwargs: Any) -> Any:
    batches = estimator.predict(lambda: features, yield_single_examples=False, **kwargs)
    return next(iter(list(batches)))


def receiver(features: Any, **kwargs: Any) -> Any:
    return build_raw_serving_input_receiver_fn(features, **kwargs)


def dense_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    prediction = keras.layers.Dense(1, name="dense")(features)[:, 0]
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions=prediction)
    loss = keras.losses.MeanSquaredError()(labels, prediction)
    return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.SGD(0.1))


X = np.arange(12, dtype="float32").reshape(6, 2) / 10
Y = X.sum(axis=1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Estimator:
    """A small model with one feature of two numbers."""
    return trained(tmp_path_factory.mktemp("dense"), dense_fn, (X, Y))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[Estimator, str]:
    """A model of several kinds of layers, and its export."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "hidden_away.py").write_text(MODEL)
    spec = importlib.util.spec_from_file_location(
        "hidden_away", folder / "hidden_away.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    estimator = trained(folder / "model", module.model_fn, examples(), steps=4)
    x = keras.KerasTensor((None, 3), "float32")
    receiver_fn = receiver({"x": x, "day": np.zeros(1, "int32")})
    return estimator, estimator.export_saved_model(folder / "export", receiver_fn)


def test_a_saved_model_describes_itself(mixed) -> None:
    estimator, path = mixed
    saved = load_saved_model(path)
    assert saved.path == path
    assert saved.global_step == 4
    assert saved.signatures == ("serving_default", "hidden", "twice")
    inputs = {name: str(spec) for name, spec in saved.inputs("hidden").items()}
    assert inputs == {"x": "float32[b, 3]", "day": "int32[b]"}
    assert {name: str(spec) for name, spec in saved.outputs().items()} == {
        "logits": "float32[b, 3]",
        "class": "int32[b]",
    }
    assert saved.outputs("hidden")["output"].shape == (None, 8)
    manifest = json.loads(Path(path, "manifest.json").read_text())
    contents = manifest["values"]["saved_model"]
    assert contents["platforms"] == ["cpu", "cuda", "tpu"]
    assert contents["versions"]["jax"] == jax.__version__
    arrays = {
        name.removeprefix("variables/"): entry["dtype"]
        for name, entry in manifest["arrays"].items()
        if name.startswith("variables/")
    }
    names = estimator.get_variable_names()
    assert sorted(arrays) == [
        name for name in names if not name.startswith(("global_step", "adam/"))
    ]
    assert set(arrays.values()) == {"bfloat16", "float32", "uint32"}


@pytest.mark.parametrize("num_rows", [1, 2, 12])
def test_a_saved_model_predicts_as_its_estimator(mixed, num_rows) -> None:
    estimator, path = mixed
    features, _ = examples(num_rows)
    expected = predicted(estimator, features)
    saved = load_saved_model(path)
    outputs = saved(features)
    assert sorted(outputs) == sorted(expected)
    for name, value in expected.items():
        assert outputs[name].dtype == value.dtype
        np.testing.assert_allclose(outputs[name], value, **CLOSE)
    twice = saved(features, "twice")
    np.testing.assert_allclose(twice["a"], expected["logits"], **CLOSE)
    np.testing.assert_array_equal(twice["b"], 2 * twice["a"])
    assert saved(features, signature="hidden")["output"].shape == (num_rows, 8)


def test_a_saved_model_needs_no_code_of_the_user(mixed, tmp_path) -> None:
    estimator, path = mixed
    features, _ = examples(5)
    np.savez(tmp_path / "features.npz", **features)
    code = (
        "import importlib.util, sys\n"
        "import numpy as np, replicax as rx\n"
        "assert importlib.util.find_spec('hidden_away') is None\n"
        "with np.load(sys.argv[2]) as features:\n"
        "    made = rx.estimator.load_saved_model(sys.argv[1])(dict(features))\n"
        "np.savez(sys.argv[3], **made)\n"
    )
    files = [tmp_path / "features.npz", tmp_path / "made.npz"]
    process = subprocess.run(
        [sys.executable, "-P", "-c", code, path, *files],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 0, process.stderr
    expected = predicted(estimator, features)
    with np.load(tmp_path / "made.npz") as outputs:
        assert sorted(outputs) == sorted(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(outputs[name], value, **CLOSE)


def test_features_and_predictions_may_be_single_arrays(dense, tmp_path) -> None:
    path = dense.export_saved_model(tmp_path, receiver(X), platforms=["cpu"])
    saved = load_saved_model(path)
    expected = predicted(dense, X)
    np.testing.assert_allclose(saved(X)["output"], expected, **CLOSE)
    np.testing.assert_allclose(saved({"feature": X})["output"], expected, **CLOSE)
    assert {name: str(s) for name, s in saved.inputs().items()} == {
        "feature": "float32[b, 2]"
    }


def test_the_global_step_is_that_of_the_checkpoint(tmp_path) -> None:
    def model_fn(features, labels, mode):
        y = keras.layers.Dense(1)(features)[:, 0]
        step = rx.estimator.get_global_step() + jnp.zeros(y.shape, "int32")
        return EstimatorSpec(
            mode,
            predictions={"step": step},
            loss=keras.ops.mean(y),
            optimizer=keras.optimizers.SGD(0.1),
        )

    estimator = trained(tmp_path, model_fn, (X, Y), 2)
    first = estimator.latest_checkpoint()
    estimator.train(lambda: (X, Y), steps=3)
    for checkpoint, step in ((None, 5), (first, 2)):
        path = estimator.export_saved_model(
            tmp_path / "export", receiver(X), checkpoint, platforms=["cpu"]
        )
        saved = load_saved_model(path)
        assert saved.global_step == step
        assert saved(X)["step"].tolist() == [step] * 6
    assert estimator.latest_checkpoint() != first


def test_exports_do_not_disturb_predictions(dense, tmp_path) -> None:
    batches = dense.predict(lambda: X)
    first = next(batches)
    dense.export_saved_model(tmp_path, receiver(X), platforms=["cpu"])
    rest = [first, *batches]
    np.testing.assert_allclose(rest, predicted(dense, X), **CLOSE)


# Features of a call.


@pytest.fixture(scope="module")
def saved(mixed) -> Any:
    return load_saved_model(mixed[1])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": None}, ValueError, r"needs the features x: float32.*got \['day'\]"),
        ({"y": [1]}, ValueError, r"x: float32\[b, 3\], day: .*got \['x', 'day', 'y'"),
        # JAX checks the shapes.
        ({"x": np.ones((12, 2))}, ValueError, r"x.*expected \(b, 3\).*\(12, 2\)"),
        ({"x": np.ones(3)}, ValueError, r"x.*expected \(b, 3\) and called with \(3,\)"),
        ({"x": np.ones((2, 3))}, ValueError, r"x.*\(= 2\) .* 'b' \(= 12\)"),
        ({"x": [["a"] * 3] * 12}, TypeError, "'x' must be float32.*got dtype <U1"),
        (
            {"day": np.ones(12)},
            TypeError,
            r"'day' must be int32\[b\]; got dtype float64",
        ),
        ({"day": [2**40] * 12}, TypeError, "got integers outside -2147483648 to"),
    ],
)
def test_wrong_features_of_a_saved_model(saved, change, error, match) -> None:
    features = {**examples()[0], **change}
    features = {name: x for name, x in features.items() if x is not None}
    with pytest.raises(error, match=match):
        saved(features)


def test_unknown_signatures_and_single_arrays(saved) -> None:
    with pytest.raises(ValueError, match=r"no signature 'x', only \['serving_de"):
        saved({}, "x")
    with pytest.raises(ValueError, match="no signature"):
        saved.inputs("x")
    with pytest.raises(ValueError, match=r"needs the features .* got <class 'list'>"):
        saved([1, 2])


# Models that cannot be exported.


def test_models_that_need_the_number_of_rows(tmp_path) -> None:
    def model_fn(features, labels, mode):
        y = keras.layers.Dense(1)(features)[:, 0]
        numbers = jnp.asarray(np.arange(int(y.shape[0])), "float32")
        return EstimatorSpec(
            mode,
            predictions={"y": y + numbers},
            loss=keras.ops.mean(y),
            optimizer=keras.optimizers.SGD(0.1),
        )

    estimator = trained(tmp_path / "model", model_fn, (X, Y), 1)
    with pytest.raises(ValueError, match=r"number of rows.*default_batch_size=") as e:
        estimator.export_saved_model(tmp_path / "export", receiver(X))
    assert "signature 'serving_default'" in str(e.value)
    assert e.value.__cause__ is not None
    assert not (tmp_path / "export").exists()
    path = estimator.export_saved_model(
        tmp_path / "export", receiver(X, default_batch_size=6), platforms=["cpu"]
    )
    saved = load_saved_model(path)
    np.testing.assert_allclose(saved(X)["y"], predicted(estimator, X)["y"], **CLOSE)
    with pytest.raises(ValueError, match=r"expected \(6, 2\) and called with \(5, 2\)"):
        saved(X[:5])


def test_models_for_another_platform_are_refused(dense, tmp_path) -> None:
    path = dense.export_saved_model(tmp_path, receiver(X), platforms=["tpu"])
    with pytest.raises(ValueError, match=r"'tpu'.*used on '.*cpu"):
        load_saved_model(path)(X)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"platforms": ["gpu"]}, ValueError, r"cannot be exported for \['gpu'\]"),
        ({"serving_input_receiver_fn": X}, TypeError, "must be a function; got array"),
        ({"serving_input_receiver_fn": lambda: X}, TypeError, "must be a ServingInput"),
        ({"serving_input_receiver_fn": receiver(np.array(["a"]))}, TypeError, "string"),
    ],
)
def test_wrong_exports(dense, tmp_path, arguments, error, match) -> None:
    with pytest.raises(error, match=match):
        dense.export_saved_model(
            tmp_path, **{"serving_input_receiver_fn": receiver(X), **arguments}
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("predictions", "exported", "error", "match"),
    [
        (
            lambda y: {"y": [y, y]},
            None,
            TypeError,
            "'serving_default' must be an array",
        ),
        (lambda y: y, {"a": None}, TypeError, "'a' must be an array.*'output' is None"),
    ],
)
def test_wrong_outputs(tmp_path, predictions, exported, error, match) -> None:
    def model_fn(features, labels, mode):
        y = keras.layers.Dense(1)(features)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(
                mode, predictions=predictions(y), export_outputs=exported
            )
        loss, optimizer = keras.ops.mean(y), keras.optimizers.SGD(0.1)
        return EstimatorSpec(mode, loss=loss, optimizer=optimizer)

    estimator = trained(tmp_path / "model", model_fn, (X, Y), 1)
    with pytest.raises(error, match=match):
        estimator.export_saved_model(tmp_path / "export", receiver(X))


def test_wrong_receivers() -> None:
    with pytest.raises(ValueError, match="'x' must have a first dimension"):
        receiver({"x": np.float32(1)})
    with pytest.raises(ValueError, match=r"others; got shape \(None, None\)"):
        receiver({"x": keras.KerasTensor((None, None), "float32")})
    with pytest.raises(ValueError, match=r"default_batch_size must be.*got 0"):
        receiver(X, default_batch_size=0)


def test_a_preprocess_function_is_not_exported(tmp_path, caplog) -> None:
    estimator = Estimator(
        dense_fn, tmp_path / "model", preprocess=lambda x, y: (x["x"] / 10, y)
    )
    estimator.train(lambda: ({"x": X * 10}, Y), steps=1)
    with caplog.at_level(logging.WARNING, "replicax"):
        path = estimator.export_saved_model(
            tmp_path / "export", receiver(X), platforms=["cpu"]
        )
    assert "the preprocess function is Python code" in caplog.text
    expected = predicted(estimator, {"x": X * 10})
    np.testing.assert_allclose(load_saved_model(path)(X)["output"], expected, **CLOSE)
