"""Distributed datasets in functions of a `ClusterCoordinator`, on real processes."""

import time

import numpy as np
import pytest

import replicax.testing

NUM = 24


def read():
    import replicax as rx

    x = np.arange(NUM, dtype="float32")
    # It is made before the coordinator, which decides what a loop over it reads.
    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    early = strategy.experimental_distribute_dataset(x, batch_size=2)
    coordinator = rx.ClusterCoordinator(strategy)

    def late():
        return strategy.experimental_distribute_dataset(x, batch_size=2)

    def parts(context):
        mine = slice(context.input_pipeline_id, None, context.num_input_pipelines)
        return list(x.reshape(-1, 2)[mine])

    def from_function():
        return strategy.distribute_datasets_from_function(parts)

    def take_all(iterator):
        time.sleep(0.1)  # So that both workers get some.
        return values(iterator)

    def values(batches):
        return [
            float(number)
            for batch in batches
            for rows in strategy.experimental_local_results(batch)
            for number in np.asarray(rows)
        ]

    found = {}
    for name, data in (("early", early), ("late", late), ("own", from_function)):
        iterator = iter(coordinator.create_per_worker_dataset(data))
        results = [coordinator.schedule(take_all, (iterator,)) for _ in range(6)]
        # All that read later than the first on a worker are at the data's end.
        found[name] = [read for read in coordinator.fetch(results) if read]
    found["in the function"] = coordinator.fetch(
        [coordinator.schedule(lambda: (len(late()), values(late())))]
    )
    found["chief"] = values(late()) if strategy.is_chief else []
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_no_batch_is_left_to_the_chief_which_runs_no_functions():
    results = replicax.testing.run(
        read, tasks={"worker": 3, "ps": 1}, logical_devices=1, deadline_seconds=100
    )
    found = results["worker:0"].value
    everything = [float(i) for i in range(NUM)]
    assert found["early"] == found["late"] == [everything] * 2
    assert len(found["own"]) == 2
    assert sorted(number for each in found["own"] for number in each) == everything
    assert found["in the function"] == [(NUM // 2, everything)]
    assert found["chief"] == everything
