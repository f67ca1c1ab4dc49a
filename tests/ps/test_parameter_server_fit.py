"""`fit` of workers that share an epoch's steps, on real parameter servers.

Two workers of one device and two servers run the cases of `served_cases`, in a cluster
for most of them and one for those that take longer in all.
"""

import math

import jax
import numpy as np
import pytest
from tests.ps.served_cases import (
    CASES,
    NUM,
    SLOW_CASES,
    X,
    another_model_than_the_chief_has,
    run_cases,
    unseeded_initial_weights,
)
from tests.ps.served_logs import LOG_CASES

import replicax as rx
import replicax.testing

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.multiprocess

WORKERS = ["worker:0", "worker:1"]


def train(cases):
    # No seed: the workers' random numbers are the chief's all the same.
    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=30))
    with strategy.scope():
        unseeded = unseeded_initial_weights(strategy)
    results = run_cases(strategy, cases) | {"unseeded": unseeded}
    # Of the whole job: when all have come here.
    strategy.session.barrier("the end")
    staleness = strategy.staleness(), dict(strategy.session.staleness)
    strategy.session.barrier("the end is seen")
    with strategy.scope():
        # This worker ends; the chief continues without it.
        results["mismatch"] = another_model_than_the_chief_has(strategy)
    return results, *staleness


def train_in_most_ways():
    return train(CASES | LOG_CASES)


def train_in_other_ways():
    return train(SLOW_CASES)


def run(program, folder):
    results = replicax.testing.run(
        program,
        tasks={"worker": 2, "ps": 2},
        logical_devices=1,
        env={"FOLDER": str(folder)},
        deadline_seconds=200,
    )
    return [results[name].value for name in WORKERS]


@pytest.fixture(scope="module")
def most(tmp_path_factory):
    """What both workers returned."""
    return run(train_in_most_ways, tmp_path_factory.mktemp("most"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return run(train_in_other_ways, tmp_path_factory.mktemp("others"))


def equal_outcome(workers, name):
    """A case's outcome, equal on both workers, and the values of each worker's own."""
    found = [dict(results[name]) for results, _, _ in workers]
    for outcome_of in found:
        assert "failed" not in outcome_of, outcome_of["failed"]
    own = [outcome_of.pop("own", None) for outcome_of in found]
    leaves = [jax.tree_util.tree_leaves_with_path(f) for f in found]
    for (path, a), (_, b) in zip(*leaves, strict=True):
        where = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(a, b, err_msg=where)
    return found[0], own


NUM_STEPS = {
    "uneven_data_with_validation": 88,
    "learning_rate_scheduler": 33,
    "early_stopping_restores_best_weights": 44,
    "part_of_a_py_dataset_in_each_epoch": 15,
    "more_workers_than_steps": 3,
    "batch_normalization": 44,
}
SLOW_NUM_STEPS = {
    "sparse_rows": 22,
    "generator_in_epochs": 20,
    "arrays_in_epochs_of_some_steps": 15,
    "generator_that_ends": 11,
    "steps_per_execution": 22,
    "grain_dataset": 22,
    "py_dataset_with_threads": 22,
    "moving_average_of_weights": 22,
    "another_worker_stops_after_an_epoch": 33,
    "values_assigned_at_the_start_of_an_epoch": 33,
    "dropout_masks": 22,
    "a_slow_worker_does_less": 83,
}
# Epochs of some of the data.
NOT_ALL = {
    "part_of_a_py_dataset_in_each_epoch": [128, 128, 74, 128],
    "arrays_in_epochs_of_some_steps": [128, 128, 74, 128],
    "generator_in_epochs": [160, 160, 138, 160],
}


def assert_every_batch_once(workers, name, num_steps):
    found, _ = equal_outcome(workers, name)
    history = found["history"]
    expected = NOT_ALL.get(name, [NUM] * len(history["once"]))
    assert history["once"] == expected
    assert not any(history["more"])
    assert found["iterations"] == num_steps
    assert all(np.isfinite(loss) for loss in history["loss"])


@pytest.mark.parametrize("name", NUM_STEPS)
def test_every_batch_is_trained_on_once(most, name):
    assert_every_batch_once(most, name, NUM_STEPS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_NUM_STEPS)
def test_every_batch_is_trained_on_once_in_other_ways(others, name):
    assert_every_batch_once(others, name, SLOW_NUM_STEPS[name])


def test_both_workers_train_together(most):
    found, own = equal_outcome(most, "uneven_data_with_validation")
    assert sum(each["steps"] for each in own) == 88
    assert min(each["steps"] for each in own) > 0
    assert found["history"]["accuracy"][-1] > 0.93
    assert found["history"]["val_accuracy"][-1] > 0.93
    assert found["evaluated"][1] > 0.93
    # Slots are on the servers: here are iterations and learning rate only.
    assert found["num_optimizer_variables"] == 2


def test_callbacks_may_evaluate_and_predict_within_an_epoch(most):
    found, own = equal_outcome(most, "evaluates_within_an_epoch")
    assert found["iterations"] == 11
    assert sorted(batch for each in own for batch, _, _ in each) == [0, 4, 8]
    for each in own:
        for _, evaluated, predicted in each:
            assert evaluated == pytest.approx(predicted, rel=1e-5)


def test_staleness_is_what_the_workers_saw(most):
    for _, of_all, _ in most:
        for name, (_, _, own) in zip(WORKERS, most, strict=True):
            # Each server counts each push; the two see the same number of them.
            assert sum(of_all[name].values()) >= sum(own.values())
            assert max(of_all[name]) == max(own)


def test_initial_weights_are_the_chiefs_without_a_seed(most):
    equal_outcome(most, "unseeded")


def test_a_scheduled_learning_rate_holds_from_its_epoch_on(most):
    found, _ = equal_outcome(most, "learning_rate_scheduler")
    assert_unchanged(found["each"][0], found["each"][2])
    assert found["history"]["learning_rate"] == pytest.approx([0.1, 0, 0])


def assert_unchanged(before, after, tolerance=0.0):
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def assert_changed(before, after):
    assert max(np.abs(a - b).max() for a, b in zip(before, after, strict=True)) > 1e-3


def test_early_stopping_restores_the_best_weights(most):
    found, _ = equal_outcome(most, "early_stopping_restores_best_weights")
    history = found["first"]
    assert len(history["loss"]) == 3
    assert found["evaluated"]["loss"] == pytest.approx(history["val_loss"][0], rel=1e-5)
    # The next fit continues from the best weights.
    assert found["history"]["loss"][0] < history["loss"][0]


def test_a_worker_without_a_step_has_all_values(most):
    found, own = equal_outcome(most, "more_workers_than_steps")
    assert sum(each["steps"] for each in own) == 3
    history = found["history"]
    assert history["val_once"] == [NUM] * 3
    assert history["val_loss"][2] < history["val_loss"][0]


def test_moving_statistics_are_those_of_all_workers(most):
    found, _ = equal_outcome(most, "batch_normalization")
    mean = found["weights"][4]
    assert np.abs(mean).max() > 0.1


@pytest.mark.parametrize(
    "name",
    [
        "chief_stops_in_the_middle_of_an_epoch",
        "another_worker_stops_in_the_middle_of_an_epoch",
        "one_of_a_thousand_stops_in_the_middle_of_an_epoch",
    ],
)
def test_all_stop_in_the_middle_of_an_epoch(most, name):
    found, _ = equal_outcome(most, name)
    # The one that stops may have had no step in an epoch that others were quick to do.
    *whole, once = found["history"]["once"]
    assert all(epoch == NUM for epoch in whole)
    assert 4 <= once <= NUM  # One batch at least.
    # The last batch of an epoch has 2 examples.
    batches = [math.ceil(epoch / 4) for epoch in [*whole, once]]
    assert sum(batches) == found["iterations"]


def test_all_workers_get_weights_that_the_chief_assigns(most):
    found, _ = equal_outcome(most, "weights_that_the_chief_assigns")
    for weights, value in ((found["first"], 0.25), (found["second"], 0.5)):
        # The learning rate is 0; the moving statistics do move.
        for each in weights[:4] + weights[6:8]:
            if each.ndim == 2:
                np.testing.assert_array_equal(each, value)
    for a, b in zip(found["weights"], found["second"], strict=True):
        if a.ndim == 2:
            np.testing.assert_array_equal(a, b)


def test_single_batches_train_everywhere(most):
    found, own = equal_outcome(most, "single_batches")
    assert found["tested"] < min(each["losses"][0] for each in own)
    assert found["iterations"] == 10


def test_a_distributed_dataset_is_trained_on(most):
    found, _ = equal_outcome(most, "a_distributed_dataset")
    assert found["history"]["more"] == [0, 0, 0]
    assert all(0 < once <= NUM for once in found["history"]["once"])


def test_each_worker_evaluates_all_of_a_distributed_dataset(most):
    found, _ = equal_outcome(most, "evaluates_distributed_datasets")
    assert found["whole"]["once"] == NUM
    for evaluated in found["evaluated"]:
        assert evaluated == pytest.approx(found["whole"], rel=1e-5)
    history = found["history"]
    assert history["val_once"] == [NUM]
    assert history["val_loss"] == pytest.approx([found["whole"]["loss"]], rel=1e-5)
    np.testing.assert_allclose(*found["predicted"], rtol=1e-5)


def test_counters_of_steps_are_summed_over_workers(most):
    found, last = equal_outcome(most, "variables_that_steps_count_in")
    assert found["counted"] == [[22, 2 * NUM], [111, 3 * NUM]]
    # What a step sets, without the old value, is each worker's own.
    assert all(0 < abs(value) <= 1 for value in last)


def test_logs_of_own_steps_are_those_of_all_workers(most):
    found, printed = equal_outcome(most, "logs_of_own_steps")
    for history in (found["several"], found["one"]):
        assert history.keys() == {"size", "accuracy", "loss"}
    np.testing.assert_allclose(found["one"]["size"], np.abs(X[:48]).mean(), rtol=1e-5)
    assert found["verbose"] == 2  # A line an epoch, by default.
    for text in printed:
        assert "3/3 - " in text
        assert "\r" not in text
        assert "\b" not in text


def test_metrics_that_are_no_sums_are_warned_about(most):
    found, _ = equal_outcome(most, "warnings_of_a_maximum")
    assert found == {
        "own_metric": False,
        "fit": True,
        "evaluate": False,
        "closure": True,
    }


def test_another_model_than_the_chiefs_is_an_error_at_once(most):
    (chief, _, _), (worker, _, _) = most
    assert chief["mismatch"] is None
    error, seconds = worker["mismatch"]
    assert "differs from the chief's" in error
    assert "[6, 9]" in error
    assert "[6, 8]" in error
    assert seconds < 20


@pytest.mark.slow
def test_weightless_examples_change_nothing(others):
    found, _ = equal_outcome(others, "weights_of_classes_and_samples")
    assert_unchanged(found["first"], found["weights"])


@pytest.mark.slow
def test_dropout_masks_differ_between_workers(others):
    _, own = equal_outcome(others, "dropout_masks")
    assert (own[0]["mask"] != own[1]["mask"]).mean() > 0.2


@pytest.mark.slow
def test_a_slow_worker_does_less(others):
    _, own = equal_outcome(others, "a_slow_worker_does_less")
    assert 0 < own[1]["steps"] < own[0]["steps"]
    assert own[0]["steps"] + own[1]["steps"] == 83


@pytest.mark.slow
def test_metrics_of_many_numbers_are_summed(others):
    found, _ = equal_outcome(others, "a_large_metric")
    assert found["history"]["large"] == pytest.approx([11 * 1.2345678], rel=1e-5)


@pytest.mark.slow
def test_values_assigned_at_the_start_of_an_epoch_are_used(others):
    found, _ = equal_outcome(others, "values_assigned_at_the_start_of_an_epoch")
    for each in found["weights"]:
        np.testing.assert_array_equal(each, 2)


@pytest.mark.slow
def test_each_worker_trains_on_its_own_files(others):
    found, _ = equal_outcome(others, "datasets_from_a_function")
    assert not any(found["history"]["more"])


@pytest.mark.slow
def test_steps_that_are_assigned_and_states_that_others_would_need(others):
    found, _ = equal_outcome(others, "assigned_steps_and_states")
    steps, moved = zip(*found["trained"], strict=True)
    assert steps == (104, 4, 64, 11)
    assert [m > 0.001 for m in moved] == [False, True, False, True]
    assert "layer 'gru' of model" in found["refused"]
    assert "Use one worker" in found["refused"]
    assert "SwapEMAWeights swaps weights" in found["swaps"]
    assert found["after"] == (104, 0.0)
