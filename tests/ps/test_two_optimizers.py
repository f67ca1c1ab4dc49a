"""Variables that functions of a `ClusterCoordinator` train with two optimizers."""

import pytest

import replicax.testing


def train():
    import keras

    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    coordinator = rx.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = keras.Variable(0.0, name="weight")
        optimizers = [keras.optimizers.SGD(rate) for rate in (1.0, 10.0)]

    def step(number):
        def replica_fn():
            optimizers[number].apply([weight * 0 - 1], [weight])

        strategy.run(replica_fn)

    def trained_by(*numbers):
        for number in numbers:
            coordinator.schedule(step, (number,))
        coordinator.join()
        return float(weight.value)

    found = [trained_by(0, 0), trained_by(1, 1), trained_by(0), trained_by(1)]
    if strategy.is_chief:
        weight.assign(100.0)
    found.append(trained_by(1, 1, 1))
    with pytest.raises(NotImplementedError) as refused:
        trained_by(0, 1, 0)
    return found, str(refused.value)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_one_after_another_and_not_at_a_time():
    results = replicax.testing.run(
        train,
        tasks={"worker": 3, "ps": 1},
        logical_devices=1,
        deadline_seconds=100,
    )
    found, refused = results["worker:0"].value
    assert found == [2.0, 22.0, 23.0, 33.0, 130.0]
    for task in ("worker:0", "worker:1", "worker:2"):
        assert results[task].value[1] == refused
    assert "variable 'weight' is trained by two optimizers at a time" in refused
