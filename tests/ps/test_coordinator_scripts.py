"""Random numbers, replica ids, dtypes and models in functions of a coordinator."""

import random
import time

import numpy as np
import pytest

import replicax.testing

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(120)]

TASKS = {"chief": 1, "worker": 2, "ps": 1}


def run_all():
    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    coordinator = rx.ClusterCoordinator(strategy)
    programs = (
        draw_random_numbers,
        number_replicas,
        use_wide_dtypes,
    )
    return {each.__name__: each(strategy, coordinator) for each in programs}


@pytest.fixture(scope="module")
def found():
    """What each program returned in the chief and in both workers."""
    results = replicax.testing.run(
        run_all, tasks=TASKS, logical_devices=2, deadline_seconds=100
    )
    return [results[name].value for name in ("chief:0", "worker:0", "worker:1")]


def on_both(strategy, coordinator, fn, *args):
    """What a function returns on each of two workers."""

    def slowly(*args):
        time.sleep(0.5)  # The other worker takes the next one.
        return strategy.session.name, fn(*args)

    found = coordinator.fetch([coordinator.schedule(slowly, args) for _ in range(2)])
    assert len(dict(found)) == 2
    return dict(found)


def draw_random_numbers(strategy, coordinator):
    def shuffled():
        return np.random.permutation(100)

    def drawn():
        while True:
            yield random.random()

    def take(iterator):
        return [float(next(iterator)) for _ in range(5)]

    found = {}
    for dataset_fn in (shuffled, drawn):
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        found[dataset_fn.__name__] = on_both(strategy, coordinator, take, iterator)
    return found | {"script": (random.random(), np.random.rand())}


def test_functions_draw_different_random_numbers_and_scripts_equal_ones(found):
    chief, *workers = [each["draw_random_numbers"] for each in found]
    assert workers == [chief, chief]
    for name in ("shuffled", "drawn"):
        first, second = chief[name].values()
        assert first != second


def number_replicas(strategy, coordinator):
    import keras
    import numpy as np

    import replicax as rx

    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=1)

    def replica_fn():
        context = rx.get_replica_context()
        mask = dropout(np.ones((64,), "float32"), training=True)
        return context.replica_id_in_sync_group, mask

    def step():
        numbers, masks = strategy.run(replica_fn)
        local = strategy.experimental_local_results
        return [int(x) for x in local(numbers)], [x.tolist() for x in local(masks)]

    return on_both(strategy, coordinator, step), strategy.num_replicas_in_sync


def test_replicas_of_an_asynchronous_step_are_its_workers_own(found):
    by_worker, number = found[0]["number_replicas"]
    assert number == 2
    assert [numbers for numbers, _ in by_worker.values()] == [[0, 1]] * 2
    # All four have masks of their own.
    masks = [tuple(mask) for _, both in by_worker.values() for mask in both]
    assert len(set(masks)) == 4


def use_wide_dtypes(strategy, coordinator):
    import jax.numpy as jnp
    import keras

    with strategy.scope():
        count = keras.Variable(0, dtype="int64", trainable=False)
        weight = keras.Variable(1.0, dtype="float64")
        optimizer = keras.optimizers.SGD(0.25)

    def step():
        count.assign_add(2)
        strategy.run(lambda: optimizer.apply([jnp.ones(())], [weight]))

    for _ in range(3):
        coordinator.schedule(step)
    coordinator.join()
    return int(count.value), float(weight.value)


def test_variables_may_have_wider_dtypes_than_jax(found):
    # Two replicas, whose gradients are summed.
    expected = (6, 1.0 - 3 * 2 * 0.25)
    assert [each["use_wide_dtypes"] for each in found] == [expected] * 3


def build_in_a_function():
    import keras

    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    coordinator = rx.ClusterCoordinator(strategy)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, name="late")])
        optimizer = keras.optimizers.SGD(0.01)

    def replica_fn(x):
        def loss_of(x):
            return keras.ops.mean(model(x))

        if not model.built:
            model.build(x.shape)
        _, gradients = rx.value_and_grad(loss_of, model.trainable_variables)(x)
        optimizer.apply(gradients, model.trainable_variables)

    def step():
        strategy.run(replica_fn, args=(np.ones((2, 4), "float32"),))

    coordinator.schedule(step)
    coordinator.join()


def test_a_model_that_only_functions_build_is_refused():
    results = replicax.testing.run(
        build_in_a_function,
        tasks=TASKS | {"worker": 1},
        logical_devices=1,
        deadline_seconds=100,
        check=False,
    )
    chief = results["chief:0"]
    assert (chief.exit_code, chief.report.kind) == (1, "mismatch")
    for part in ("late/kernel", "the chief does not have", "model.build"):
        assert part in chief.output
