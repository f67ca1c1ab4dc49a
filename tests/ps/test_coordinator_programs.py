"""Functions of a `ClusterCoordinator` that assign, train and measure, on one cluster.

Each program runs in every task. Its functions run on the chief alone, or on two other
workers, which have two replicas each.
"""

import time

import numpy as np
import pytest

import replicax.testing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(150),
]

NUM_CLOSURES = 12
STEPS = 6
TRUE = np.array([0.0, 1.0, 0.0, 1.0])
PREDICTED = np.array([0.1, 0.2, 0.6, 0.9])


def run_all():
    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    coordinator = rx.ClusterCoordinator(strategy)
    programs = [
        assign_in_functions,
        train_what_was_assigned,
        share_statistics,
        evaluate_shards,
    ]
    if len(strategy.session.workers) > 1:
        programs.append(train_with_two_optimizers)
    return {each.__name__: each(strategy, coordinator) for each in programs}


@pytest.fixture(scope="module", params=[1, 3])
def tasks(request):
    """The results of all workers, by their number."""
    results = replicax.testing.run(
        run_all,
        tasks={"worker": request.param, "ps": 2},
        logical_devices=2,
        deadline_seconds=120,
    )
    return [results[f"worker:{i}"] for i in range(request.param)]


def of(tasks, program):
    return [task.value[program] for task in tasks]


def assign_in_functions(strategy, coordinator):
    import jax.numpy as jnp
    import keras

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


def test_assignments_of_functions_count_on_any_worker(tasks):
    total = float(sum(range(NUM_CLOSURES)))
    for found in of(tasks, "assign_in_functions"):
        assert found["seen"] == total
        assert found["set"] == [[5.0] * 3] * 2
        # The gradients of two replicas are summed.
        assert found["trained"] == (1.0 - 4 * 2 * 0.25, 4)
        assert found["assigned by the script"] == 96.0
        *added, first, mean, untouched = found["added"]
        assert added == [total, 0.5 + 2.0 * NUM_CLOSURES]
        assert first == mean == NUM_CLOSURES
        assert untouched == 7.0
        assert len(set(found["by"])) == max(1, len(tasks) - 1)


def train_what_was_assigned(strategy, coordinator):
    import jax.numpy as jnp
    import keras

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
        coordinator.schedule(read)  # It makes its worker pull values again.
    coordinator.join()
    return read(), coordinator.schedule(read).fetch()


def test_training_begins_with_what_functions_have_assigned(tasks):
    trained = (3.0 - 4 * 2 * 0.25, 1.0 + 4.0 + 4 * 1.0)
    for found in of(tasks, "train_what_was_assigned"):
        assert found == (trained, trained)


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


def share_statistics(strategy, coordinator):
    first, second, values = programs(strategy)
    for _ in range(STEPS):
        coordinator.schedule(first)
        coordinator.schedule(second)
    coordinator.join()
    return values(), coordinator.schedule(values).fetch()


def test_programs_share_some_of_their_moving_statistics(tasks):
    trained = [1.0 - STEPS * 2 * 0.25] * 2
    expected = [STEPS, 101.0 * STEPS, STEPS, *trained]
    for found in of(tasks, "share_statistics"):
        assert found == (expected, expected)


def train_with_two_optimizers(strategy, coordinator):
    import keras

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


def test_two_optimizers_train_one_after_another_and_not_at_a_time(tasks):
    if len(tasks) == 1:
        pytest.skip("one worker runs its functions one after another")
    (found, refused), *others = of(tasks, "train_with_two_optimizers")
    assert found == [4.0, 44.0, 46.0, 66.0, 160.0]
    assert all(other[1] == refused for other in others)
    assert "variable 'weight' is trained by two optimizers at a time" in refused


def evaluate_shards(strategy, coordinator):
    import keras

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


def test_metrics_that_functions_create_keep_the_scripts_names(tasks):
    expected = {"of shards": ("auc", 0.75), "of all": ("auc_1", 0.75)}
    assert of(tasks, "evaluate_shards") == [expected] * len(tasks)
    warning = "assigned the bool variable 'flag'. The value stays on this worker"
    # A worker warns once; a chief that runs the functions itself does not.
    warnings = [task.output.count(warning) for task in tasks]
    assert max(warnings) == (len(tasks) > 1)


def loop():
    import replicax as rx

    strategy = rx.ParameterServerStrategy(timeouts=rx.Timeouts(step=40, chief=20))
    first, second, values = programs(strategy)
    for _ in range(STEPS):
        first()
        second()
    strategy.session.barrier("all have trained")
    strategy.servers.refresh()
    return values()


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
