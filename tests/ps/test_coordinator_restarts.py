"""ClusterCoordinator, where the server with the queue is killed and started again."""

import time
from pathlib import Path

import pytest
from tests.ps.coordinators import ENV, command_of, wait_for

import replicax.testing

pytest.importorskip("pyarrow")


def train_in_functions(folder):
    """Twenty updates, of which the last one writes the snapshot, and a few more."""
    import keras

    import replicax as rx
    from replicax.ps.coordinator import ClusterCoordinator
    from replicax.ps.strategy import ParameterServerStrategy

    strategy = ParameterServerStrategy(
        snapshot_dir=f"{folder}/snapshots",
        snapshot_every_updates=20,
        snapshot_every_seconds=None,
        timeouts=rx.Timeouts(step=40, chief=40, server=60),
    )
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
        total = keras.Variable(0.0, name="total")

    def step():
        strategy.run(lambda: optimizer.apply([total.value * 0 - 1], [total]))
        return 1

    done = coordinator.fetch([coordinator.schedule(step) for _ in range(20)])
    coordinator.join()
    if strategy.is_chief:
        print("trained", flush=True)
        wait_for(lambda: next(Path(folder).glob("snapshots/*/snapshot-*[0-9]"), None))
    more = [coordinator.schedule(time.sleep, (0.5,)) for _ in range(8)]
    if strategy.is_chief:
        print("scheduled more", flush=True)
    coordinator.fetch(more)
    return sum(done)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(160)
def test_functions_that_a_restarted_server_has_forgotten_are_reported(tmp_path):
    with replicax.testing.Cluster(
        train_in_functions,
        tasks={"chief": 1, "worker": 1, "ps": 1},
        args=(str(tmp_path),),
        env=ENV,
        deadline_seconds=140,
    ) as cluster:
        cluster.task("chief:0").wait_for("scheduled more", timeout_seconds=90)
        start_again = command_of(cluster.task("ps:0"))
        cluster.task("ps:0").kill()
        with start_again() as again:
            assert cluster.task("chief:0").wait(timeout_seconds=60) == 138
            output = cluster.task("chief:0").output
            assert again.wait(60) == 1
    assert "ps:0 was restarted and has lost closures that were scheduled" in output
