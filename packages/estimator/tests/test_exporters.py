"""Exporters: when they export, and how many exports they keep."""

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from replicax_estimator import (
    BestExporter,
    Estimator,
    EstimatorSpec,
    EvalSpec,
    Exporter,
    FinalExporter,
    LatestExporter,
    RunConfig,
    TrainSpec,
    build_raw_serving_input_receiver_fn,
    load_saved_model,
    train_and_evaluate,
)
from replicax_estimator.evaluating import append_evaluation

X = np.ones((4, 2), "float32")
RECEIVER_FN = build_raw_serving_input_receiver_fn({"x": X})


def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
    prediction = keras.layers.Dense(1)(features["x"])[:, 0]
    return EstimatorSpec(
        mode,
        predictions={"y": prediction},
        loss=keras.ops.mean(prediction**2),
        optimizer=keras.optimizers.SGD(0.01),
    )


def input_fn() -> Any:
    return {"x": X}, X[:, 0]


@pytest.fixture
def estimator(tmp_path) -> Estimator:
    config = RunConfig(tf_random_seed=0, save_checkpoints_steps=1)
    return Estimator(model_fn, tmp_path / "model", config).train(input_fn, steps=1)


def export(
    exporter: Exporter,
    estimator: Estimator,
    result: dict[str, Any] | None = None,
    *,
    final: bool = False,
) -> str | None:
    return exporter.export(
        estimator=estimator,
        export_path=str(Path(estimator.model_dir, "export", exporter.name)),
        checkpoint_path=estimator.latest_checkpoint(),
        eval_result={"loss": 1.0, "global_step": 1} if result is None else result,
        is_the_final_export=final,
    )


def exports(estimator: Estimator, exporter: Exporter) -> list[str]:
    return sorted(
        map(str, Path(estimator.model_dir, "export", exporter.name).iterdir())
    )


def test_the_final_exporter_exports_at_the_end(estimator) -> None:
    exporter = FinalExporter("last", RECEIVER_FN)
    assert export(exporter, estimator) is None
    path = export(exporter, estimator, final=True)
    assert load_saved_model(path).global_step == 1


@pytest.mark.parametrize(("num_kept", "first"), [(2, 4), (None, 0)])
def test_the_latest_exporter_keeps_the_latest(estimator, num_kept, first) -> None:
    exporter = LatestExporter("latest", RECEIVER_FN, exports_to_keep=num_kept)
    paths = [export(exporter, estimator) for _ in range(6)]
    assert exports(estimator, exporter) == paths[first:]
    load_saved_model(paths[first])


def test_the_best_exporter_exports_better_ones(estimator) -> None:
    def is_larger(best_eval_result, current_eval_result):
        return current_eval_result["auc"] > best_eval_result["auc"]

    exporter = BestExporter("auc", RECEIVER_FN, is_larger)
    made = [export(exporter, estimator, {"auc": auc}) is not None for auc in (1, 0, 2)]
    assert made == [True, False, True]
    exporter = BestExporter(serving_input_receiver_fn=RECEIVER_FN)
    losses = [math.nan, 3.0, 4.0, 3.0, 2.0, math.nan, 1.5]
    made = [
        export(exporter, estimator, {"loss": loss, "global_step": step}) is not None
        for step, loss in enumerate(losses)
    ]
    assert made == [True, True, False, False, True, False, True]


def test_the_best_exporter_reads_earlier_evaluations(estimator) -> None:
    evaluations = Path(estimator.eval_dir())
    for step, loss in ((1, 2.0), (2, 1.0), (3, 5.0)):
        append_evaluation(evaluations, "x", {"loss": loss, "global_step": step})
    # As in training, the current evaluation is already in the file.
    append_evaluation(evaluations, "x", {"loss": 1.5, "global_step": 4})
    exporter = BestExporter(serving_input_receiver_fn=RECEIVER_FN)
    assert export(exporter, estimator, {"loss": 1.5, "global_step": 4}) is None
    assert export(exporter, estimator, {"loss": 0.5, "global_step": 5}) is not None
    # Evaluations of another data set do not count.
    other = BestExporter("other", RECEIVER_FN, eval_name="test")
    assert export(other, estimator, {"loss": 9.0, "global_step": 4}) is not None


def test_train_and_evaluate_exports(tmp_path) -> None:
    config = RunConfig(tf_random_seed=0, save_checkpoints_steps=2)
    estimator = Estimator(model_fn, tmp_path, config)
    best = BestExporter(serving_input_receiver_fn=RECEIVER_FN, exports_to_keep=1)
    final = FinalExporter("final", RECEIVER_FN)
    spec = EvalSpec(input_fn, exporters=[best, final], throttle_secs=0)
    done = train_and_evaluate(estimator, TrainSpec(input_fn, max_steps=4), spec)
    assert done is not None
    made = done[1]
    assert all(path is not None for path in made)
    assert exports(estimator, best) == [made[0]]
    assert exports(estimator, final) == [made[1]]
    expected = next(iter(estimator.predict(input_fn)))["y"]
    for path in made:
        saved = load_saved_model(path)
        assert saved.global_step == 4
        # The saved program may order sums differently.
        np.testing.assert_allclose(saved({"x": X})["y"][0], expected, rtol=1e-5)


def test_wrong_exporters() -> None:
    with pytest.raises(TypeError, match="BestExporter: serving_input_receiver_fn must"):
        BestExporter()
    with pytest.raises(ValueError, match=r"exports_to_keep must be.*got 0"):
        LatestExporter("x", RECEIVER_FN, 0)
    with pytest.raises(TypeError, match="compare_fn must be a"):
        BestExporter("x", RECEIVER_FN, 3)
