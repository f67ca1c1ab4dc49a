"""Names and arguments of tf.estimator that are not here say what to use instead."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import replicax as rx

FEATURES = {"x": np.arange(3)}
DAY = rx.feature_column.categorical_column_with_identity("day", 7)


def receiver_fn() -> Any:
    return rx.estimator.ServingInputReceiver(np.zeros((1, 2), "float32"))


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        ("estimator", "DNNEstimator", "a model_fn for rx.estimator.Estimator"),
        ("estimator", "MultiLabelHead", "there are no heads"),
        ("estimator", "CheckpointSaverHook", "save_checkpoints_steps"),
        ("estimator.experimental", "InMemoryEvaluatorHook", "train_and_evaluate"),
        ("estimator.export", "PredictOutput", "the array, or the dict of arrays"),
        ("feature_column", "sequence_numeric_column", "Keras layers"),
        ("feature_column", "shared_embedding_columns", "use shared_embeddings"),
    ],
)
def test_names(module: str, name: str, hint: str) -> None:
    found: Any = rx
    for part in module.split("."):
        found = getattr(found, part)
    with pytest.raises(
        AttributeError, match=f"'rx.{module}' has no .*'{name}'; .*{hint}"
    ):
        getattr(found, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'\.$"):
        found.nothing  # noqa: B018


def test_tf_has_functions_of_receivers_in_a_module() -> None:
    export = rx.estimator.export
    assert export.ServingInputReceiver is rx.estimator.ServingInputReceiver
    receiver = export.build_raw_serving_input_receiver_fn(FEATURES)()
    assert str(receiver.specs()["x"]) == "int64[b]"


@pytest.mark.parametrize(
    ("called", "argument", "hint"),
    [
        (rx.estimator.RunConfig, "session_config", "leave it out"),
        (rx.estimator.RunConfig, "experimental_distribute", "train_distribute"),
        (
            lambda **given: rx.estimator.EstimatorSpec("eval", loss=1.0, **given),
            "scaffold",
            "warm_start_from",
        ),
        (rx.estimator.StepCounterHook, "output_dir", "steps_per_second"),
        (
            lambda **given: rx.estimator.LatestExporter("x", receiver_fn, **given),
            "assets_extra",
            "copies files",
        ),
        (
            lambda **given: rx.estimator.BestExporter("x", receiver_fn, **given),
            "event_file_pattern",
            "eval_name",
        ),
        (
            lambda **given: rx.estimator.numpy_input_fn(
                FEATURES, shuffle=False, **given
            ),
            "num_threads",
            "leave it out",
        ),
        (
            lambda **given: rx.feature_column.embedding_column(DAY, 2, **given),
            "ckpt_to_load_from",
            "initializer",
        ),
    ],
)
def test_arguments(called: Callable[..., Any], argument: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"no argument '{argument}', got 3.*{hint}"):
        called(**{argument: 3})
    # TF's default asks for nothing.
    assert called(**{argument: None}) is not None
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        called(other=None)


def test_signatures_are_those_of_what_is_there() -> None:
    names = list(inspect.signature(rx.estimator.numpy_input_fn).parameters)
    assert names == ["x", "y", "batch_size", "num_epochs", "shuffle", "seed"]
    assert "protocol" not in inspect.signature(rx.estimator.RunConfig).parameters
    assert isinstance(rx.estimator.StepCounterHook(5), rx.estimator.SessionRunHook)
