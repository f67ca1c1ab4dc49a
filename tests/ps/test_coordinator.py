"""ClusterCoordinator, on clusters of real processes."""

import os
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import replicax.testing

ENV = {"REPLICAX_PS_TOKEN": "a-token-of-the-tests"}
CLUSTER = {"chief": 1, "worker": 2, "ps": 1}


def make(**timeouts):
    import replicax as rx
    from replicax.ps.coordinator import ClusterCoordinator
    from replicax.ps.strategy import ParameterServerStrategy

    timeouts = rx.Timeouts(**{"step": 40, "chief": 20} | timeouts)
    strategy = ParameterServerStrategy(timeouts=timeouts)
    return strategy, ClusterCoordinator(strategy)


def run(program, tasks=None, **options):
    return replicax.testing.run(
        program, tasks=tasks or CLUSTER, env=ENV, deadline_seconds=100, **options
    )


# What closures return, and where they run.


def use_results():
    import jax.numpy as jnp

    strategy, coordinator = make()
    name = strategy.session.name
    found = {}

    def where(i):
        time.sleep(0.3 if name == "worker:1" else 0.01)
        return i, name

    found["where"] = coordinator.fetch(
        [coordinator.schedule(where, (i,)) for i in range(30)]
    )
    first = coordinator.schedule(lambda x, y: x + y, ([1, 2],), {"y": [3]})
    second = coordinator.schedule(lambda: {"x": jnp.ones((2,), "bfloat16")})
    third = coordinator.schedule(lambda v: v["x"] * 3, (second,))
    nested = coordinator.fetch({"a": [first, (second,)], "b": third, "c": 5})
    found["nested"] = repr(nested)
    found["again"] = first.get() + first.fetch()
    # It is known by now.
    found["known"] = coordinator.schedule(len, (first,)).fetch()

    def dataset_fn(context):
        found["context"] = context
        while True:
            yield from range(context.input_pipeline_id, 1000, 2)

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))

    def take(iterator):
        time.sleep(0.02)
        return name, next(iterator)

    found["taken"] = coordinator.fetch(
        [coordinator.schedule(take, args=(iterator,)) for _ in range(20)]
    )
    slow = coordinator.schedule(time.sleep, (0.5,))
    looks = 0
    while not coordinator.done():
        looks += 1
    found["done"] = slow.fetch() is None
    found["looks"] = looks
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_results_come_back_from_whichever_worker_is_free():
    results = run(use_results)
    chief, *workers = [results[n].value for n in ("chief:0", "worker:0", "worker:1")]
    assert [i for i, _ in chief["where"]] == list(range(30))
    done = Counter(name for _, name in chief["where"])
    assert set(done) == {"worker:0", "worker:1"}
    assert done["worker:1"] < done["worker:0"]
    assert chief["nested"] == (
        "{'a': [[1, 2, 3], ({'x': array([1, 1], dtype=bfloat16)},)], "
        "'b': array([3, 3], dtype=bfloat16), 'c': 5}"
    )
    assert chief["again"] == [1, 2, 3, 1, 2, 3]
    assert chief["known"] == 3
    assert chief["done"]
    assert chief["looks"] > 2
    # Each worker has an iterator of its own.
    for i, name in enumerate(["worker:0", "worker:1"]):
        taken = [x for who, x in chief["taken"] if who == name]
        assert taken == [i + 2 * k for k in range(len(taken))]
        context = workers[i].pop("context")
        assert (context.num_input_pipelines, context.input_pipeline_id) == (2, i)
    # All scripts saw the same.
    assert workers[0] == workers[1] == chief


# Errors.


class OwnError(Exception):
    pass


def make_mistakes():
    strategy, coordinator = make()
    found = []

    def caught(call, *args):
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            found.append((type(error).__name__, text))

    def bad(n):
        raise ValueError(f"bad {n}")

    def own():
        raise OwnError("of the script")

    def mistake(n):
        scheduled = [coordinator.schedule(bad, (n,))]
        scheduled += [coordinator.schedule(time.sleep, (0.05,)) for _ in range(20)]
        coordinator.join()

    caught(mistake, 1)
    caught(coordinator.join)  # The error is reported once.
    assert len(found) == 1

    def pause():
        time.sleep(1)  # Until the next one is scheduled, which would raise the error.
        return 2

    failed = coordinator.schedule(bad, (coordinator.schedule(pause),))
    needy = coordinator.schedule(len, (failed,))
    caught(needy.fetch)
    caught(coordinator.join)
    caught(coordinator.join)
    coordinator.schedule(own)
    caught(coordinator.join)
    coordinator.schedule(next, (iter(coordinator.create_per_worker_dataset([])),))
    caught(coordinator.join)
    coordinator.schedule(lambda: make_mistakes)
    caught(coordinator.join)
    coordinator.schedule(coordinator.join)
    caught(coordinator.join)
    if strategy.is_chief:
        before = len(found)
        caught(coordinator.schedule, bad, ([strategy],))
        assert found.pop()[1].startswith("ClusterCoordinator: args[0][0] is of type")
        assert len(found) == before
    good = coordinator.schedule(lambda: "goes on")
    coordinator.join()
    told = len(found)
    hide_errors(coordinator, caught, bad)
    return found[:told], good.fetch(), found[told:]


def hide_errors(coordinator, caught, bad):
    def breaks():
        yield 1
        raise ValueError("bad record")

    iterator = iter(coordinator.create_per_worker_dataset(breaks))
    for _ in range(6):  # A worker gets an item, then the error, then nothing.
        coordinator.schedule(next, (iterator,))
        caught(coordinator.join)
    late = []

    def cancel():
        late.append(coordinator.schedule(bad, (3,)))
        for _ in range(20):
            late.append(coordinator.schedule(time.sleep, (0.05,)))
        coordinator.join()

    caught(cancel)
    caught(late[-1].fetch)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_an_error_is_raised_once_with_its_traceback():
    results = run(make_mistakes)
    found, good, later = results["chief:0"].value
    assert good == "goes on"
    kinds = [kind for kind, _ in found]
    assert kinds[0] == "ValueError"
    assert kinds[1] in ("ValueError", "ClosureCancelledError")
    assert kinds[2:] == [
        "ValueError",
        "ClosureError",
        "ClosureError",
        "TypeError",
        "ContextError",
    ]
    assert found[0][1].startswith("bad 1\nIn ")
    assert 'raise ValueError(f"bad {n}")' in found[0][1]
    assert "make_mistakes.<locals>.bad on worker:" in found[0][1]
    assert "OwnError: of the script" in found[3][1]
    assert "StopIteration: an iterator is at its end" in found[4][1]
    assert "the result of" in found[5][1]
    assert "Only the script itself" in found[6][1]
    *broken, _, (_, cancelled) = later
    assert {kind for kind, _ in broken} == {"ValueError", "ClosureError"}
    assert any("bad record" in text for _, text in broken)
    assert "bad 3" in cancelled
    for worker in ("worker:0", "worker:1"):
        assert results[worker].value == results["chief:0"].value


def leave_the_chief_alone():
    strategy, coordinator = make(step=90)
    if not strategy.is_chief:
        return
    # More than the board keeps, so that it has to wait before `join`.
    for i in range(5000):
        coordinator.schedule(len, ([i],))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_chief_whose_workers_have_ended_says_so_at_once():
    """Calls under `if strategy.is_chief`: no restart would help, so the code is 1."""
    results = run(
        leave_the_chief_alone, {"chief": 1, "worker": 1, "ps": 1}, check=False
    )
    assert results["worker:0"].exit_code == 0
    assert results["chief:0"].exit_code == 1
    assert results["chief:0"].report.kind == "mismatch"
    assert (
        "chief:0: the scripts of worker:0 have ended, but functions of the "
        "ClusterCoordinator wait for a worker."
    ) in results["chief:0"].output
    assert "`if strategy.is_chief`" in results["chief:0"].output


def end_within_a_function():
    _, coordinator = make()

    def leave(i):
        raise SystemExit(3)

    coordinator.schedule(leave, (1,))
    coordinator.join()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_function_that_ends_its_worker_is_an_error():
    """Another worker would end, too, and then all of them."""
    results = run(end_within_a_function, check=False)
    chief = results["chief:0"]
    assert chief.exit_code == 1
    assert "ClosureError: SystemExit: 3" in chief.output
    assert "leave on worker:" in chief.output
    assert 3 in {results[name].exit_code for name in ("worker:0", "worker:1")}


# Training.


def train(steps, tape):
    import keras
    from sklearn.datasets import load_digits

    import replicax as rx

    # Not the same in all tasks: the chief's values are the ones that count.
    keras.utils.set_random_seed(os.getpid())
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    strategy, coordinator = make()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(32, "relu"),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_fn = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def dataset_fn(context):
        rng = np.random.default_rng(context.input_pipeline_id)
        while True:
            rows = rng.integers(0, 1500, 64)
            yield images[rows], labels[rows]

    def loss_of(x, y):
        predictions = model(x, training=True)
        accuracy.update_state(y, predictions)
        return rx.compute_average_loss(loss_fn(y, predictions), global_batch_size=64)

    def replica_fn(x, y):
        if tape:
            with rx.GradientTape() as recorded:
                loss = loss_of(x, y)
            gradients = recorded.gradient(loss, model.trainable_variables)
        else:
            loss, gradients = rx.value_and_grad(loss_of, model.trainable_variables)(
                x, y
            )
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step_fn(iterator):
        losses = strategy.run(replica_fn, args=next(iterator))
        return strategy.reduce("sum", losses)

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    history = []
    for epoch in range(3):
        accuracy.reset_state()
        optimizer.learning_rate = 0.01 / (epoch + 1)
        for _ in range(steps):
            loss = coordinator.schedule(step_fn, args=(iterator,))
        coordinator.join()
        history.append(
            (float(loss.fetch()), float(accuracy.result()), float(accuracy.count))
        )
    scores = np.asarray(model(images[1500:]))
    return {
        "history": history,
        "test": float((scores.argmax(-1) == labels[1500:]).mean()),
        "iterations": int(optimizer.iterations.value),
        "weights": [np.asarray(v) for v in model.weights],
    }


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_the_tutorials_loop_trains_digits():
    results = run(train, args=(60, False))
    found = [results[n].value for n in ("chief:0", "worker:0", "worker:1")]
    chief = found[0]
    assert chief["test"] > 0.9
    assert chief["iterations"] == 180
    # Every closure's metric is counted once.
    assert [count for _, _, count in chief["history"]] == [60 * 64] * 3
    assert chief["history"][-1][1] > 0.95
    for other in found[1:]:
        assert other["history"] == chief["history"]
        for a, b in zip(other["weights"], chief["weights"], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_a_chief_alone_runs_the_closures_itself():
    results = run(train, {"worker": 1, "ps": 1}, args=(40, True))
    found = results["worker:0"].value
    assert found["test"] > 0.85
    assert found["iterations"] == 120
    assert [count for _, _, count in found["history"]] == [40 * 64] * 3


def assign():
    import keras

    strategy, coordinator = make()
    name = strategy.session.name
    with strategy.scope():
        variables = [keras.Variable([0.0], name="v") for _ in range(2)]
        optimizers = [keras.optimizers.SGD(1.0) for _ in range(2)]

    def step(number):
        def replica_fn():
            gradient = keras.ops.ones_like(variables[number].value)
            optimizers[number].apply([gradient], [variables[number]])

        if name == "worker:0":  # The workers begin with different optimizers.
            time.sleep(0.2)
        strategy.run(replica_fn)

    def read():
        return [float(v.value[0]) for v in variables]

    def state():
        return read(), coordinator.schedule(read).fetch()

    found = []
    for number in (0, 1, 1, 0, 1):
        coordinator.schedule(step, (number,))
    coordinator.join()
    found.append(state())
    optimizers[1].learning_rate = 10.0
    coordinator.schedule(step, (1,))
    coordinator.join()
    found.append(state())
    variables[0].assign([100.0])
    coordinator.schedule(step, (0,))
    coordinator.join()
    found.append(state())
    again = type(coordinator)(strategy)
    return found, again is coordinator


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_functions_see_the_newest_and_assigned_values():
    results = run(assign)
    expected = [[-2.0, -3.0], [-2.0, -13.0], [99.0, -13.0]]
    found, is_same = results["chief:0"].value
    assert is_same
    assert [here for here, _ in found] == expected
    for task in ("chief:0", "worker:0", "worker:1"):
        found, _ = results[task].value
        assert [fetched for _, fetched in found] == expected
        # Before that, a slow worker may have got values that came later.
        assert found[-1][0] == expected[-1]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_the_guides_script_trains(tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "coordinator.md").read_text()
    found = re.search(r"^```python no-run\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    script = tmp_path / "script.py"
    script.write_text(found[1])
    results = run(script, {"worker": 3, "ps": 1})
    accuracy = re.search(r"test accuracy ([0-9.]+)", results["worker:0"].output)
    # Asynchronous: seven runs had 0.89 to 0.97. A model that learns nothing has 0.1.
    assert float(accuracy[1]) > 0.8


def test_other_strategies_are_refused():
    import replicax as rx
    from replicax.ps.coordinator import ClusterCoordinator

    with pytest.raises(TypeError, match="must be a ParameterServerStrategy; got Mirr"):
        ClusterCoordinator(rx.MirroredStrategy())
