"""Datasets that fill the same arrays with their next batch."""

import numpy as np

import replicax as rx


def test_batches_of_a_step_are_those_that_were_read() -> None:
    """As readers with one buffer do: a step of several replicas reads several."""

    def batches(context: rx.InputContext):
        buffer = np.empty((2, 1), "float32")
        for i in range(4):
            buffer[:] = i
            yield buffer

    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.distribute_datasets_from_function(batches)
    seen = [
        float(np.asarray(part).max(initial=-1))
        for step in dataset
        for part in strategy.experimental_local_results(step)
    ]
    assert [value for value in seen if value >= 0] == list(range(4))
