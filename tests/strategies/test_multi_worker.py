"""Custom loops on two workers, and the members of a cluster.

A chief and a worker of two devices each, and an evaluator beside them, run
`everything`; the tests look at what they returned. Where there is an oracle it is the
same function in the process of the tests: one replica with the global batches, or four
replicas where the result depends on the replicas themselves.
"""

import functools
import random

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from tests.strategies import parity

import replicax as rx
import replicax.testing

_RNG = np.random.default_rng(7)
X = _RNG.normal(size=(32, 5)).astype("float32")
Y = _RNG.normal(size=(32, 2)).astype("float32")
BATCH_SIZE = 8


def network():
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, activation="tanh"), layers.Dense(2)]
    )


def squared_error(y, prediction):
    return ops.sum(ops.square(y - prediction)) / BATCH_SIZE


def trained(strategy, make_step):
    """Losses and weights of two epochs of a custom loop."""
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model, optimizer = network(), keras.optimizers.Adam(0.01)
    step = make_step(model, optimizer)
    dataset = strategy.experimental_distribute_dataset((X, Y), batch_size=BATCH_SIZE)
    losses = [
        float(strategy.reduce("sum", strategy.run(step, (batch,)), axis=None))
        for _ in range(2)
        for batch in dataset
    ]
    return {"losses": losses, "weights": model.get_weights()}


def tape_step(model, optimizer):
    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = squared_error(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def replica_values(strategy):
    """Values of the replica context, reduced and gathered."""

    def context_values():
        context = rx.get_replica_context()
        number = ops.cast(context.replica_id_in_sync_group, "float32")
        row = number + ops.arange(3, dtype="float32")[None]
        return {
            "number": number,
            "row": row,
            "sum": context.all_reduce(rx.ReduceOp.SUM, row),
            "rows": context.all_gather(row, axis=0),
        }

    made = strategy.run(context_values)
    given = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(10 * context.replica_id_in_sync_group)
    )
    added = strategy.run(lambda a, b: a + b, (given, made["number"]))
    return {
        "gathered": strategy.gather(made["row"], axis=0),
        "gathered along 1": strategy.gather(made["row"], axis=1),
        "sums": strategy.reduce(rx.ReduceOp.SUM, made["row"], axis=None),
        "means": strategy.reduce(rx.ReduceOp.MEAN, made["row"], axis=None),
        "sum of all": strategy.reduce(rx.ReduceOp.SUM, made["row"], axis=1),
        "sum in replicas": strategy.gather(made["sum"], axis=0),
        "gathered in replicas": strategy.gather(made["rows"], axis=0),
        "given": strategy.reduce(rx.ReduceOp.SUM, added, axis=None),
    }


def local_values(strategy):
    value = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    local = strategy.experimental_local_results(value)
    return {
        "local": [int(x) for x in local],
        "np.asarray": error_of(ValueError, lambda: np.asarray(value)),
        "repr": repr(value),
    }


def equal_results(strategy):
    """A loop over batches that do not divide; its state is equal on all replicas."""

    def step(state, batch):
        total = rx.get_replica_context().all_reduce("sum", batch.sum())
        return state + total, total, batch.shape[0]

    state, totals, seen, local = np.float32(0), [], 0, []
    data = np.arange(11, dtype="float32")
    for batch in strategy.experimental_distribute_dataset(data, batch_size=4):
        state, total, size = strategy.run(step, (state, batch))
        totals.append(float(total))
        seen += int(strategy.reduce("sum", size))
        local.append(len(strategy.experimental_local_results(total)))
    return {"state": float(state), "totals": totals, "seen": seen, "local": local}


def sharded_arguments(strategy):
    """Global arrays of a user's own mesh, of which each process has a part."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    x = np.arange(8, dtype="float32").reshape(4, 2)
    sharded = jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
    own = rx.PerReplica(sharded)
    sums = strategy.run(lambda x: x.sum(), (own,))
    return {
        "whole": float(strategy.run(lambda x: x.sum(), (sharded,))),
        "rows": float(strategy.run(lambda x: x[0].sum() + x[3].sum(), (sharded,))),
        "own": [float(v) for v in strategy.experimental_local_results(sums)],
    }


def dropout_masks(strategy):
    """Two calls' masks of all replicas: `[2, R, 64]`."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layer = layers.Dropout(0.5)

    def masked():
        return layer(ops.ones((1, 64)), training=True)

    return [strategy.gather(strategy.run(masked), axis=0) for _ in range(2)]


def error_of(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def fitted(strategy):
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    initial = model.get_weights()
    model.fit(X, Y, batch_size=BATCH_SIZE, epochs=2, verbose=0)
    return {"initial": initial, "trained": model.get_weights()}


def draws_alone(strategy):
    if strategy.task_type == "worker":
        random.random()
        np.random.random(3)


def after_numbers_drawn_by_one(strategy):
    """A worker draws random numbers by itself; `fit` shuffles nevertheless."""
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    draws_alone(strategy)
    model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0)
    strategy.check_replicas(model.variables)
    return {
        "next": [random.random(), np.random.random()],
        # Creating weights does not compare the workers' random states.
        "before a model": error_of(
            rx.ClusterMismatchError,
            lambda: (draws_alone(strategy), fitted(strategy)),
        ),
    }


def differing_copies(strategy):
    with strategy.scope():
        same = keras.Variable(np.zeros(3, "float32"), name="same")
        other = keras.Variable(np.zeros(3, "float32"), name="other")

    def step():
        other.assign(other + 1.0)
        return same + 1.0

    strategy.run(step)
    strategy.check_replicas()
    if strategy.task_type == "worker":
        other.assign([0.0, 1.0, 0.0])
    else:
        other.assign([0.0, 0.0, 0.0])
    return {
        "all": error_of(rx.DivergenceError, strategy.check_replicas),
        "the equal one": error_of(
            rx.DivergenceError, lambda: strategy.check_replicas([same])
        ),
        "in a first program": error_of(
            rx.ClusterMismatchError, lambda: fresh_strategy_meets(strategy)
        ),
        "every step": error_of(rx.DivergenceError, lambda: strategy.run(step)),
    }


def differing_arguments(strategy):
    """Arguments that all replicas get, but that each worker computes by itself."""
    own = float(strategy.task_type == "worker")
    many = np.arange(12.0, dtype="float32")

    def error_for(rate, **state):
        return error_of(
            rx.ClusterMismatchError,
            lambda: strategy.run(lambda rate, w: w["w"] * rate, (rate,), {"w": state}),
        )

    def step(w, rate):
        return w * rate

    w = strategy.run(step, (np.ones(3, "float32"), 1.0))
    strategy.run(step, (w, 1.0))
    return {
        "number": error_for(0.5 + own, w=many),
        "NumPy": error_for(0.5, w=np.float32([1, own])),
        "JAX": error_for(0.5, w=jax.numpy.float32([1, own])),
        "many": error_for(0.5, w=many + own * (many == 7)),
        "key": error_of(
            rx.ClusterMismatchError,
            lambda: strategy.run(jax.random.bits, (jax.random.key(int(own)),)),
        ),
        "every step": error_of(
            rx.DivergenceError, lambda: strategy.run(step, (w, 2.0 + own))
        ),
        "rounded": error_for(0.1 + own * 1e-12, w=many),
    }


def freed_on_one_worker():
    """Checks after Python has freed a variable on one worker only, as it may."""
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        freed = [keras.Variable(np.zeros(n, "float32"), name=f"f{n}") for n in (1, 2)]
        kept = keras.Variable(np.zeros(3, "float32"), name="kept")
    if strategy.task_type == "worker":
        kept.assign([0.0, 1.0, 0.0])
        freed = freed[:1]
    return {
        "all": error_of(rx.DivergenceError, strategy.check_replicas),
        "others": error_of(
            rx.ClusterMismatchError, lambda: strategy.check_replicas([*freed, kept])
        ),
    }


def fresh_strategy_meets(strategy):
    """A strategy's first program, with a variable that each worker makes its own."""
    new = rx.MultiWorkerMirroredStrategy()
    with new.scope():
        variable = keras.Variable(float(strategy.task_type == "worker"), name="own")
    new.run(lambda: variable + 1.0)


def facts(strategy):
    return {
        "repr": repr(strategy),
        "task": (strategy.task_type, strategy.task_id),
        "num_workers": strategy.num_workers,
        "num_replicas": strategy.num_replicas_in_sync,
        "is_chief": strategy.workers.is_chief,
    }


def on_the_cpu():
    """Whether an array on Keras' device "cpu" is in this process' memory."""
    with keras.device("cpu"):
        array = keras.ops.ones(3)
    return bool(array.is_fully_addressable)


def everything():
    strategy = rx.MultiWorkerMirroredStrategy()
    results = {"facts": facts(strategy), "on the CPU": on_the_cpu()}
    # Nobody has set a seed yet.
    results["fitted"] = fitted(strategy)
    if strategy.task_type == "evaluator":
        return results
    results["drawn by one"] = after_numbers_drawn_by_one(strategy)
    ring = rx.experimental.CollectiveCommunication.RING
    old_spelling = rx.experimental.MultiWorkerMirroredStrategy(ring)
    results["loop"] = trained(old_spelling, tape_step)
    results["replica values"] = replica_values(strategy)
    results["local"] = local_values(strategy)
    results["equal"] = equal_results(strategy)
    results["sharded"] = sharded_arguments(strategy)
    results["masks"] = dropout_masks(strategy)
    checking = rx.MultiWorkerMirroredStrategy(check_replicas_every=1)
    results["differing"] = differing_copies(checking)
    results["arguments"] = differing_arguments(checking)
    results["freed on one"] = freed_on_one_worker()
    return jax.tree.map(
        lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, results
    )


@pytest.fixture(scope="module")
def tasks():
    """What each task returned, by its name."""
    return replicax.testing.run(
        everything,
        tasks={"chief": 1, "worker": 1, "evaluator": 1},
        logical_devices=2,
        deadline_seconds=120,
    ).returned


def mirrored(num_replicas):
    return rx.MirroredStrategy(parity.cpus(num_replicas))


# float32 sums over four replicas in another order: about 1e-7 of a gradient each step,
# of which Adam, which divides by the gradients' sizes, makes more.
assert_same = functools.partial(parity.assert_same, rtol=1e-4, atol=1e-5)
assert_identical = functools.partial(parity.assert_same, rtol=0, atol=0)


@pytest.mark.multiprocess
def test_members_of_a_cluster(tasks):
    name = "MultiWorkerMirroredStrategy"
    assert tasks["chief:0"]["facts"] == {
        "repr": f"{name}(chief:0 of 2 workers, 2 replicas each)",
        "task": ("chief", 0),
        "num_workers": 2,
        "num_replicas": 4,
        "is_chief": True,
    }
    assert tasks["worker:0"]["facts"] == {
        "repr": f"{name}(worker:0 of 2 workers, 2 replicas each)",
        "task": ("worker", 0),
        "num_workers": 2,
        "num_replicas": 4,
        "is_chief": False,
    }


@pytest.mark.multiprocess
def test_the_cpu_of_keras_is_each_workers_own(tasks):
    assert [task["on the CPU"] for task in tasks.values()] == [True] * 3


@pytest.mark.multiprocess
def test_an_evaluator_is_no_member(tasks):
    assert tasks["evaluator:0"]["facts"] == {
        "repr": "MultiWorkerMirroredStrategy(cpu:0, cpu:1)",
        "task": ("evaluator", 0),
        "num_workers": 1,
        "num_replicas": 2,
        "is_chief": True,
    }


@pytest.mark.multiprocess
def test_initial_weights_are_the_same_without_a_seed(tasks):
    own, others = tasks["chief:0"]["fitted"], tasks["worker:0"]["fitted"]
    assert_identical(others, own)
    assert not np.array_equal(own["trained"][0], own["initial"][0])
    # The evaluator has other random numbers; otherwise the test would prove nothing.
    alone = tasks["evaluator:0"]["fitted"]["initial"]
    assert not np.array_equal(alone[0], own["initial"][0])


@pytest.mark.multiprocess
def test_fit_synchronizes_numbers_that_one_worker_drew(tasks):
    own, others = (tasks[name]["drawn by one"] for name in ("chief:0", "worker:0"))
    assert own["next"] == others["next"]


@pytest.mark.multiprocess
def test_weights_made_after_numbers_that_one_worker_drew_are_refused(tasks):
    for name in ("chief:0", "worker:0"):
        message = tasks[name]["drawn by one"]["before a model"]
        assert "the variables' values (their checksums)" in message
        assert "/kernel " in message


@pytest.mark.multiprocess
def test_a_loop_is_as_with_one_replica(tasks):
    expected = trained(mirrored(1), tape_step)
    assert_same(tasks["chief:0"]["loop"], expected)
    assert_identical(tasks["worker:0"]["loop"], tasks["chief:0"]["loop"])
    assert expected["losses"][-1] < expected["losses"][0]


@pytest.mark.multiprocess
def test_replica_values(tasks):
    expected = replica_values(mirrored(4))
    np.testing.assert_array_equal(
        expected["gathered"], np.arange(4)[:, None] + np.arange(3)
    )
    for name in ("chief:0", "worker:0"):
        assert_identical(tasks[name]["replica values"], expected)


@pytest.mark.multiprocess
def test_a_worker_sees_its_own_values(tasks):
    assert tasks["chief:0"]["local"]["local"] == [0, 1]
    assert tasks["worker:0"]["local"]["local"] == [2, 3]
    for name in ("chief:0", "worker:0"):
        message = tasks[name]["local"]["np.asarray"]
        assert "some of the values are on other workers" in message
        assert "experimental_local_results" in message
        assert "num_replicas=4" in tasks[name]["local"]["repr"]


@pytest.mark.multiprocess
def test_equal_results_are_arrays_on_all_workers(tasks):
    # 3 examples are shared by 3 of the 4 replicas: the last one has none.
    equal = {"state": 55.0, "totals": [6.0, 22.0, 27.0], "seen": 11}
    for name, last in (("chief:0", 2), ("worker:0", 1)):
        assert tasks[name]["equal"] == {**equal, "local": [2, 2, last]}


@pytest.mark.multiprocess
def test_sharded_arguments_are_not_cut_to_the_part_of_a_worker(tasks):
    for name, own in (("chief:0", [1.0, 5.0]), ("worker:0", [9.0, 13.0])):
        expected = {"whole": 28.0, "rows": 14.0, "own": own}
        assert tasks[name]["sharded"] == expected


@pytest.mark.multiprocess
def test_dropout_masks_differ_between_all_replicas(tasks):
    masks = np.concatenate(tasks["chief:0"]["masks"])
    assert masks.shape == (8, 64)
    assert len({mask.tobytes() for mask in masks}) == 8
    assert_identical(tasks["worker:0"]["masks"], tasks["chief:0"]["masks"])
    assert_identical(tasks["chief:0"]["masks"], dropout_masks(mirrored(4)))


@pytest.mark.multiprocess
def test_copies_that_differ_are_found_on_all_workers(tasks):
    for name in ("chief:0", "worker:0"):
        found = tasks[name]["differing"]
        assert "'other' on replicas [2, 3]" in found["all"]
        assert "'same'" not in found["all"]
        assert found["the equal one"] == "no error"
        assert "copies differ from replica 0's" in found["every step"]
        message = found["in a first program"]
        assert "the variables' values (their checksums), entry 0" in message
        assert "on chief:0" in message
        assert "on worker:0" in message


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("case", "name", "values"),
    [
        ("number", "args[0]", ["0.5", "1.5"]),
        ("NumPy", "kwargs['w']['w']", ["[1.0, 0.0]", "[1.0, 1.0]"]),
        ("JAX", "kwargs['w']['w']", ["[1.0, 0.0]", "[1.0, 1.0]"]),
        ("many", "kwargs['w']['w']", ["float32[12] with checksum"]),
        ("key", "args[0]", ["key<fry>[] with checksum"]),
    ],
)
def test_arguments_that_differ_are_named(tasks, case, name, values):
    for task in ("chief:0", "worker:0"):
        message = tasks[task]["arguments"][case]
        assert f"an argument that all replicas get, {name} is" in message
        for value in ["on chief:0", "on worker:0", *values]:
            assert value in message


@pytest.mark.multiprocess
def test_arguments_of_later_steps_are_compared_with_the_copies(tasks):
    for task in ("chief:0", "worker:0"):
        found = tasks[task]["arguments"]
        assert "args[1] on replicas [2, 3]" in found["every step"]
        assert found["rounded"] == "no error"  # Equal in float32.


@pytest.mark.multiprocess
def test_variables_that_one_worker_has_freed_are_not_compared(tasks):
    for name in ("chief:0", "worker:0"):
        found = tasks[name]["freed on one"]
        assert "'kept' on replicas [2, 3]" in found["all"]
        assert "'f1'" not in found["all"]
        assert "check_replicas: the variables, entry 1" in found["others"]


# By itself: no other process is needed.


def resolver(task_type="worker", task_id=0, **jobs):
    spec = rx.ClusterSpec(jobs or {"worker": ["localhost:1", "localhost:2"]})
    return rx.cluster_resolver.SimpleClusterResolver(
        spec, task_type=task_type, task_id=task_id
    )


@pytest.mark.parametrize(
    "tf_config",
    [
        None,
        '{"cluster": {"worker": ["localhost:1"]}, '
        '"task": {"type": "worker", "index": 0}}',
    ],
    ids=["no TF_CONFIG", "a cluster of one"],
)
def test_one_worker_trains_alone(monkeypatch, tf_config):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if tf_config is not None:
        monkeypatch.setenv("TF_CONFIG", tf_config)
    strategy = rx.MultiWorkerMirroredStrategy()
    assert strategy.num_workers == 1
    assert strategy.num_replicas_in_sync == len(jax.devices()) == 8
    assert (strategy.task_type is None) == (tf_config is None)
    resolver = strategy.cluster_resolver
    assert resolver.task_type == strategy.task_type
    assert bool(resolver.cluster_spec()) == (tf_config is not None)
    assert_same(trained(strategy, tape_step), trained(mirrored(1), tape_step))


def test_devices_that_are_started_are_refused():
    jax.devices()
    with pytest.raises(RuntimeError, match=r"already started .* top of the script"):
        rx.MultiWorkerMirroredStrategy(resolver())


def test_nccl_needs_gpus():
    options = rx.CommunicationOptions(implementation=rx.CollectiveCommunication.NCCL)
    with pytest.raises(rx.DeviceError, match="needs GPUs, but the devices are cpu"):
        rx.MultiWorkerMirroredStrategy(communication_options=options)
    with pytest.raises(rx.DeviceError, match="Use AUTO"):
        rx.experimental.MultiWorkerMirroredStrategy(
            rx.experimental.CommunicationImplementation.NCCL
        )


def test_parameter_servers_are_of_another_strategy():
    jobs = {"worker": ["localhost:1", "localhost:2"], "ps": ["localhost:3"]}
    with pytest.raises(rx.ClusterConfigError, match="ps"):
        rx.MultiWorkerMirroredStrategy(resolver("ps", **jobs))
