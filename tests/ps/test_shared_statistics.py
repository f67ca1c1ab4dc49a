"""Programs on parameter servers that share some of their moving statistics."""

import pytest

import replicax.testing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(150),
]
STEPS = 6


def programs(strategy):
    """Two programs, as of a GAN's two networks: `b` is written by both."""
    import jax.numpy as jnp
    import keras

    with strategy.scope():
        a, b, c = (
            keras.Variable(0.0, name=name, trainable=False, aggregation="mean")
            for name in "abc"
        )
        weights = [keras.Variable(1.0, name=f"w{i}") for i in range(2)]
        optimizers = [keras.optimizers.SGD(0.25) for _ in range(2)]

    def first():
        def replica_fn():
            a.assign(a + 1.0)
            b.assign(b + 1.0)
            optimizers[0].apply([jnp.ones(())], [weights[0]])

        strategy.run(replica_fn)

    def second():
        def replica_fn():
            b.assign(b + 100.0)
            c.assign(c + 1.0)
            optimizers[1].apply([jnp.ones(())], [weights[1]])

        strategy.run(replica_fn)

    return first, second, lambda: [float(v.value) for v in (a, b, c, *weights)]


def closures():
    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    coordinator = rx.ClusterCoordinator(strategy)
    first, second, values = programs(strategy)
    for _ in range(STEPS):
        coordinator.schedule(first)
        coordinator.schedule(second)
    coordinator.join()
    return values(), coordinator.schedule(values).fetch()


def loop():
    import replicax as rx

    timeouts = rx.Timeouts(step=40, chief=20)
    strategy = rx.ParameterServerStrategy(timeouts=timeouts)
    first, second, values = programs(strategy)
    for _ in range(STEPS):
        first()
        second()
    strategy.session.barrier("all have trained")
    strategy.servers.refresh()
    return values()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_functions_of_a_coordinator_share_them(num_workers):
    results = replicax.testing.run(
        closures,
        tasks={"worker": num_workers, "ps": 2},
        logical_devices=2,
        deadline_seconds=100,
    )
    # Two replicas, whose gradients are summed.
    trained = [1.0 - STEPS * 2 * 0.25] * 2
    expected = [STEPS, 101.0 * STEPS, STEPS, *trained]
    for i in range(num_workers):
        assert results[f"worker:{i}"].value == (expected, expected)


def test_loops_of_several_workers_share_them():
    results = replicax.testing.run(
        loop,
        tasks={"worker": 2, "ps": 2},
        logical_devices=2,
        deadline_seconds=100,
    )
    updates = 2 * STEPS
    trained = [1.0 - 2 * STEPS * 2 * 0.25] * 2
    expected = [updates, 101.0 * updates, updates, *trained]
    for i in range(2):
        assert results[f"worker:{i}"].value == expected
