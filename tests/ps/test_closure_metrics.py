"""Metrics that functions of a `ClusterCoordinator` make, and those of the script."""

import numpy as np
import pytest

import replicax.testing

TRUE = np.array([0.0, 1.0, 0.0, 1.0])
PREDICTED = np.array([0.1, 0.2, 0.6, 0.9])


def evaluate_shards():
    import keras

    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    coordinator = rx.ClusterCoordinator(strategy)
    with strategy.scope():
        flag = keras.Variable(False, dtype="bool", name="flag", trainable=False)

    def evaluate(shard):
        metric = keras.metrics.AUC(num_thresholds=50)
        metric.update_state(TRUE[[shard]], PREDICTED[[shard]])
        return [np.asarray(v) for v in metric.variables]

    def add_up(states):
        metric = keras.metrics.AUC(num_thresholds=50)
        for variable, parts in zip(
            metric.variables, zip(*states, strict=True), strict=True
        ):
            variable.assign(np.sum(parts, axis=0))
        return metric.name, float(metric.result())

    states = [coordinator.schedule(evaluate, (i % 4,)) for i in range(8)]
    found = {"of shards": add_up(coordinator.fetch(states))}
    with strategy.scope():  # As many AUCs were made here in all tasks.
        metric = keras.metrics.AUC(num_thresholds=50)

    def update(shard):
        metric.update_state(TRUE[[shard]], PREDICTED[[shard]])
        flag.assign(True)

    for i in range(4):
        coordinator.schedule(update, (i,))
    coordinator.join()
    return found | {"of all": (metric.name, float(metric.result()))}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_metrics_that_functions_make_do_not_count_as_the_scripts():
    results = replicax.testing.run(
        evaluate_shards,
        tasks={"worker": 2, "ps": 1},
        logical_devices=1,
        deadline_seconds=100,
    )
    expected = {"of shards": ("auc", 0.75), "of all": ("auc_1", 0.75)}
    for task in ("worker:0", "worker:1"):
        assert results[task].value == expected
    warning = "assigned the bool variable 'flag'. The value stays on this worker"
    assert results["worker:1"].output.count(warning) == 1
