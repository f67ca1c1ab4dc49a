"""Variables that functions of a `ClusterCoordinator` assign without an optimizer."""

import time

import pytest

import replicax.testing

NUM_CLOSURES = 12


def count():
    import jax.numpy as jnp
    import keras

    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    coordinator = rx.ClusterCoordinator(strategy)

    def variable(value, **options):
        return keras.Variable(value, name="v", trainable=False, **options)

    with strategy.scope():
        steps = variable(0, dtype="int32")
        by_run = variable(0.5)
        first = variable(0.0, aggregation="only_first_replica")
        average = variable(jnp.zeros((2, 3)))
        mean = variable(0.0, aggregation="mean")
        untouched = variable(7.0)
        weight = keras.Variable(1.0, name="weight")
        optimizer = keras.optimizers.SGD(0.25)

    def add(number):
        time.sleep(0.02)  # So that both workers get some.
        steps.assign_add(number)
        strategy.run(lambda: by_run.assign_add(2.0))
        strategy.run(lambda: first.assign(first + 1.0))
        strategy.run(lambda: mean.assign(mean + 1.0))
        return strategy.session.name

    def set_all(value):
        average.assign(jnp.full((2, 3), value))
        return float(steps.value)

    def train():
        def replica_fn():
            by_run.assign_sub(1.0)
            optimizer.apply([jnp.ones(())], [weight])

        strategy.run(replica_fn)

    def values():
        return [float(v.value) for v in (steps, by_run, first, mean, untouched)]

    def add_all():
        done = [coordinator.schedule(add, (i,)) for i in range(NUM_CLOSURES)]
        coordinator.join()
        return coordinator.fetch(done)

    found = {"by": add_all(), "added": values()}
    seen = coordinator.schedule(set_all, (3.0,)).fetch()
    coordinator.schedule(set_all, (5.0,))
    coordinator.join()
    found |= {"seen": seen, "set": average.numpy().tolist()}
    by_run.assign(100.0)
    for _ in range(4):
        coordinator.schedule(train)
    coordinator.join()
    found["trained"] = float(weight.value), int(optimizer.iterations.value)
    found["assigned by the script"] = float(by_run.value)
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_what_functions_assign_counts_whichever_worker_runs_them(num_workers):
    results = replicax.testing.run(
        count,
        tasks={"worker": num_workers, "ps": 2},
        logical_devices=2,
        deadline_seconds=100,
    )
    total = float(sum(range(NUM_CLOSURES)))
    for task in (f"worker:{i}" for i in range(num_workers)):
        found = results[task].value
        assert found["seen"] == total
        assert found["set"] == [[5.0] * 3] * 2
        # Two replicas, whose gradients are summed.
        assert found["trained"] == (1.0 - 4 * 2 * 0.25, 4)
        assert found["assigned by the script"] == 96.0
        *added, first, mean, untouched = found["added"]
        assert added == [total, 0.5 + 2.0 * NUM_CLOSURES]
        assert first == mean == NUM_CLOSURES
        assert untouched == 7.0
        assert len(set(found["by"])) == max(1, num_workers - 1)


def train_what_was_assigned():
    import jax.numpy as jnp
    import keras

    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    coordinator = rx.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = keras.Variable(1.0, name="weight")
        moving = keras.Variable(1.0, name="v", trainable=False, aggregation="mean")
        optimizer = keras.optimizers.SGD(0.25)

    def assign():
        weight.assign(3.0)
        moving.assign_add(4.0)

    def train():
        def replica_fn():
            moving.assign(moving + 1.0)
            optimizer.apply([jnp.ones(())], [weight])

        strategy.run(replica_fn)

    def read():
        return float(weight.value), float(moving.value)

    coordinator.schedule(assign)
    coordinator.join()
    for _ in range(4):
        coordinator.schedule(train)
        coordinator.schedule(read)  # It fetches values anew.
    coordinator.join()
    return read(), coordinator.schedule(read).fetch()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_training_begins_with_what_functions_have_assigned(num_workers):
    results = replicax.testing.run(
        train_what_was_assigned,
        tasks={"worker": num_workers, "ps": 2},
        logical_devices=2,
        deadline_seconds=100,
    )
    # Two replicas, whose gradients are summed.
    trained = (3.0 - 4 * 2 * 0.25, 1.0 + 4.0 + 4 * 1.0)
    for task in (f"worker:{i}" for i in range(num_workers)):
        assert results[task].value == (trained, trained)
