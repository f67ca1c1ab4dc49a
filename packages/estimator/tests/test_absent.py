"""Arguments of tf.estimator that are not here say what to use instead."""

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
