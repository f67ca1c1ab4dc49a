"""Arguments of `run`: split, replicated, or compiled in as constants."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.conftest import mirrored, values_of

import replicax as rx
from replicax.engine.arguments import (
    Arguments,
    CallFlattener,
    FlatCall,
    Kind,
    flatten_call,
)


@pytest.fixture
def strategy() -> rx.Strategy:
    return mirrored(2)


class Batch(NamedTuple):
    images: Any
    labels: Any


def kinds_of(*args: Any, **kwargs: Any) -> tuple[list[Kind], list[Any]]:
    placed: list[tuple[Any, Kind]] = []

    def place(array: Any, kind: Kind) -> Any:
        placed.append((array, kind))
        return array

    arrays = flatten_call(args, kwargs, place).arrays
    assert [a for a, _ in placed] == arrays
    return [kind for _, kind in placed], arrays


def test_kinds() -> None:
    row = rx.PerReplica(np.ones((2, 3)))
    kinds, arrays = kinds_of(row, {"b": 1, "a": 2.5}, [np.ones(2), jnp.ones(2)], k=1j)
    assert kinds == [Kind.PER_REPLICA] + [Kind.MIRRORED] * 5
    assert arrays[0] is row.array
    assert arrays[1:3] == [2.5, 1]  # Dictionaries are sorted by key.
    kinds, arrays = kinds_of(
        True, "text", None, object(), np.float32(1), np.bool_(True)
    )
    assert kinds == [Kind.MIRRORED] * 2
    assert arrays == [np.float32(1), np.bool_(True)]


def test_rebuild_restores_the_call() -> None:
    marker = object()
    args = (rx.PerReplica(np.ones((2, 3))), "s", [1, None, {"x": marker}])
    kwargs = {"flag": True, "batch": Batch(np.zeros(2), 3.0)}
    call = flatten_call(args, kwargs, lambda array, kind: array)
    arrays, arguments = call.arrays, call.make_arguments()
    assert isinstance(arguments, Arguments)
    (row, text, (one, nothing, inner)), new = arguments.rebuild(arrays)
    assert row.shape == (3,)
    assert (text, one, nothing) == ("s", 1, None)
    assert inner["x"] is marker
    assert new["flag"] is True
    assert isinstance(new["batch"], Batch)
    assert arguments.specs("r", (None,))[0] == jax.P(None, "r")
    assert arguments.specs("r", ())[1] == jax.P()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 2, True),
        (1, 1.0, False),
        (1.0, float("nan"), True),
        (1.0, 1j, False),
        (1, np.int32(1), False),
        (np.int32(1), np.int32(2), True),
        (True, False, False),
        (True, 1, False),
        ("a", "a", True),
        ("a", "b", False),
        (b"a", "a", False),
        (None, 0, False),
        ([1], (1,), False),
        ([1], [2], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"b": 1}, False),
        (Batch(1, 2), (1, 2), False),
        (np.zeros(2), np.ones(2), True),
        (np.zeros(2), np.zeros(3), False),
        (np.zeros(2, "int32"), np.zeros(2, "int16"), False),
        (np.zeros((2, 2)), rx.PerReplica(np.zeros((2, 2))), False),
        (len, len, True),
        (len, max, False),
    ],
)
def test_which_calls_share_a_program(a, b, same) -> None:
    key_a = flatten_call((a,), {}, lambda array, kind: array).key
    key_b = flatten_call((b,), {}, lambda array, kind: array).key
    assert (key_a == key_b) is same
    assert hash(key_a) == hash(key_a)


def test_pytrees_and_statics(strategy) -> None:
    class Config:
        scale = 3.0

    config = Config()

    def fn(
        batch: Batch, options: Any, *, name: str, config: Any, extra: Any = None
    ) -> Any:
        assert isinstance(batch, Batch)
        assert (name, extra, options["train"]) == ("adam", None, True)
        assert isinstance(options["train"], bool)
        return {
            "out": batch.images * config.scale + batch.labels[0] * options["weight"]
        }

    x = rx.PerReplica(np.float32([[1], [2]]))
    out = strategy.run(
        fn,
        (Batch(x, [10.0]), {"train": True, "weight": 2}),
        {"name": "adam", "config": config},
    )
    np.testing.assert_array_equal(np.asarray(out["out"]), [[23.0], [26.0]])


def test_python_numbers_promote_as_python_numbers(strategy) -> None:
    x = np.float16([1.0])
    assert strategy.run(lambda x, k: x * k, (x, 2.0)).dtype == "float16"
    assert strategy.run(lambda x, k: x * k, (x, np.float32(2))).dtype == "float32"
    assert strategy.run(lambda k: k * 2, (3,)).dtype == "int32"


def test_keras_variables_as_arguments(strategy) -> None:
    with strategy.scope():
        w, v = keras.Variable([1.0, 2.0]), keras.Variable([5.0, 5.0])

    def step(variable: keras.Variable, variables: Any) -> Any:
        assert isinstance(variable, keras.Variable)
        variable.assign_add(variables["w"] * 0 + 1.0)
        return variable.value

    for variable in (w, v, w):
        strategy.run(step, (variable, {"w": w}))
    np.testing.assert_array_equal(np.asarray(w.value), [3.0, 4.0])
    np.testing.assert_array_equal(np.asarray(v.value), [6.0, 6.0])
    assert len(strategy.runner.programs) == 2


def test_models_and_optimizers_as_arguments(strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = keras.ops.mean(model(x) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    losses = [
        float(
            strategy.reduce(
                "mean", strategy.run(step, (model, optimizer, np.ones((3, 2))))
            )
        )
        for _ in range(4)
    ]
    assert losses[-1] < losses[0]
    assert len(strategy.runner.programs) == 1


@pytest.mark.parametrize("device", [0, 1, 7])
def test_arrays_committed_to_one_device(strategy, device) -> None:
    x = jax.device_put(np.float32([[1, 2], [3, 4]]), jax.devices()[device])
    whole = strategy.run(lambda x: x.sum(), (x,))
    assert values_of(whole) == (10.0, 10.0)
    split = strategy.run(lambda x: x.sum(), (rx.PerReplica(x),))
    assert split.values == (3.0, 7.0)
    assert [v.devices() for v in split.values] == [{d} for d in jax.devices()[:2]]


def test_a_sharded_argument_goes_whole_to_every_replica_with_a_warning(caplog) -> None:
    strategy = mirrored(2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    x = jax.device_put(np.arange(8, dtype="float32"), rows)
    for _ in range(2):
        assert strategy.run(lambda x: x.sum(), (x,)) == 28.0
    (record,) = caplog.records
    assert "float32[8] is sharded" in record.getMessage()
    assert "rx.PerReplica(x.reshape(" in record.getMessage()


def test_arguments_of_another_strategys_devices() -> None:
    three = rx.MirroredStrategy(["cpu:4", "cpu:5"]).run(lambda x: x, (np.float32(3),))
    assert values_of(mirrored(2).run(lambda x: x + 1, (three,))) == (4.0, 4.0)


@pytest.mark.parametrize("num_values", [1, 3, 4])
def test_wrong_number_of_replicas_is_refused(strategy, num_values) -> None:
    x = rx.PerReplica(np.zeros((num_values, 2)))
    with pytest.raises(
        ValueError, match=rf"run: a PerReplica holds {num_values} values.* 2"
    ):
        strategy.run(lambda x: x, (x,))


def test_strings_in_arrays_are_refused(strategy) -> None:
    with pytest.raises(TypeError, match=r"str|dtype|object"):
        strategy.run(lambda x: x, (np.array(["a", "b"]),))


def test_a_repeated_call_is_not_flattened_leaf_by_leaf(strategy: rx.Strategy) -> None:
    num_placed = 0

    def place(array: Any, kind: Kind) -> Any:
        nonlocal num_placed
        num_placed += 1
        return strategy.runner._place(array, kind)

    flattener = CallFlattener(place)
    mirrored_sharding = strategy.group.mirrored

    def flatten(*args: Any) -> FlatCall:
        call = flattener.flatten(args, {})
        expected = flatten_call(args, {}, strategy.runner._place)
        assert call.key == expected.key
        assert hash(call.key) == hash(expected.key)
        assert call.num_active == expected.num_active
        for a, b in zip(call.arrays, expected.arrays, strict=True):
            assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
            np.testing.assert_array_equal(a, b)
        return call

    def state(value: float) -> Any:
        tree = {"w": jnp.full((2,), value), "b": jnp.full((), value)}
        return jax.device_put(tree, mirrored_sharding)

    flatten(state(0.0), 1.0)
    flatten(state(0.0))
    before = num_placed
    flatten(state(1.0))
    assert num_placed == before

    # Calls with other places or kinds, and uneven batches, are flattened anew.
    elsewhere = jax.device_put(state(2.0), jax.devices()[3])
    assert flatten(elsewhere).arrays[0].sharding == mirrored_sharding
    rows = jax.device_put(jnp.arange(4.0).reshape(2, 2), strategy.group.per_replica)
    flatten({"w": rx.PerReplica(rows), "b": state(3.0)["b"]})
    result = rx.PerReplica(rows, num_active=1)
    assert flatten(rx.PerReplica(rows, num_active=1), result).num_active == 1
    with pytest.raises(ValueError, match=r"all in args\[0\], 1 in args\[1\]"):
        flatten(rx.PerReplica(rows), result)


def test_mutable_arrays_are_refused(strategy: rx.Strategy) -> None:
    with pytest.raises(TypeError, match="mutable array"):
        strategy.run(lambda ref: ref[...], args=(jax.new_ref(jnp.ones(2)),))
