"""A server's optimizer makes the same steps as the Keras optimizer, applied here."""

import copy
import json

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.ps.group_vectors import SlotKey
from replicax.ps.optimizers import (
    can_split,
    can_spread,
    clip_before_push,
    optimizer_rule,
)
from replicax.ps.partition import (
    FixedShardsPartitioner,
    VariableGroup,
    VariableInfo,
    VariableShard,
    place,
)
from replicax.ps.server_optimizer import ServerOptimizer

SHAPES = {"dense/kernel": (6, 4), "dense/bias": (4,), "norm/scale": (1, 4), "s": ()}
STEPS = 7


def variables(rng, constraint=None) -> list[keras.Variable]:
    made = []
    for path, shape in SHAPES.items():
        *scope, name = path.split("/")
        with keras.name_scope(scope[0] if scope else "top"):
            made.append(keras.Variable(rng.normal(size=shape), name=name))
    made[0].constraint = constraint
    return made


def grouped(
    rule, trained, num_servers=1, partitioner=None, split=True, spread=True
) -> VariableGroup:
    infos = [
        VariableInfo(
            path=v.path,
            shape=tuple(v.shape),
            dtype=v.dtype,
            constraint=v.constraint and keras.constraints.serialize(v.constraint),
        )
        for v in trained
    ]
    group = place("weights", rule, infos, num_servers, partitioner, split, spread)
    # As it comes over the wire.
    return VariableGroup.from_json(json.loads(json.dumps(group.to_json())))


def flat(group, server, values) -> dict[str, np.ndarray]:
    vectors: dict[str, list[np.ndarray]] = {}
    for part in group.shards_on(server):
        rows = slice(None) if part.rows is None else slice(*part.rows)
        value = np.asarray(values[part.variable])
        value = value[rows] if value.ndim else value
        vectors.setdefault(part.dtype, []).append(value.ravel())
    return {d: np.concatenate(v) for d, v in vectors.items()}


def whole(group, vectors_by_server, shapes) -> list[np.ndarray]:
    values = [np.zeros(shape, np.float32) for shape in shapes]
    for server, vectors in enumerate(vectors_by_server):
        start = 0
        for part in group.shards_on(server):
            piece = np.asarray(vectors[part.dtype])[start : start + part.size]
            start += part.size
            if part.rows is None:
                values[part.variable] = piece.reshape(part.shape)
            else:
                values[part.variable][slice(*part.rows)] = piece.reshape(part.shape)
    return values


def compare(optimizer, *, split=False, constraint=None, exclude=None, rtol=1e-6):
    rng = np.random.default_rng(1)
    trained = variables(rng, constraint)
    if exclude is not None:
        optimizer.exclude_from_weight_decay(**exclude(trained))
    local = copy.deepcopy(optimizer) if exclude is None else optimizer
    rule = optimizer_rule(optimizer, trained)
    partitioner = FixedShardsPartitioner(2) if split else None
    servers = 2 if split else 1
    reach = can_split(optimizer), can_spread(optimizer)
    group = grouped(rule, trained, servers, partitioner, *reach)
    rules = [ServerOptimizer(group, server) for server in range(servers)]
    start = [np.asarray(v) for v in trained]
    states = [r.start(flat(group, i, start)) for i, r in enumerate(rules)]
    for _ in range(STEPS):
        gradients = [rng.normal(size=s).astype("float32") for s in SHAPES.values()]
        pushed = clip_before_push(local, gradients)
        pushes = [flat(group, i, pushed) for i in range(servers)]
        states = [
            r.apply(*state, push)
            for r, state, push in zip(rules, states, pushes, strict=True)
        ]
        local.apply(gradients, trained)
    got = whole(group, [vectors for vectors, _ in states], SHAPES.values())
    for variable, value, before in zip(trained, got, start, strict=True):
        np.testing.assert_allclose(value, variable, rtol=rtol, atol=1e-6)
        assert not np.allclose(value, before, atol=1e-4), "it was not updated at all"
    return local, group, rules, states


SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5, staircase=True)
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, centered=True, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(10.0),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.5, l1_regularization_strength=0.01),
    "schedule": lambda: keras.optimizers.SGD(SCHEDULE, momentum=0.9),
    "clipvalue": lambda: keras.optimizers.Adam(0.1, clipvalue=0.3),
    "ema": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=3),
    "loss scale": lambda: keras.optimizers.SGD(0.8, loss_scale_factor=8.0),
}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["schedule free"] = lambda: keras.optimizers.ScheduleFreeAdamW(0.1)
WHOLE = {
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.1),
    "muon": lambda: keras.optimizers.Muon(0.1),
}


@pytest.mark.slow(but=["adam", "accumulation"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_keras_whole_and_split(name) -> None:
    optimizer = OPTIMIZERS[name]()
    assert can_split(optimizer)
    compare(optimizer, split=True)
    if name in ("adam", "accumulation"):
        compare(OPTIMIZERS[name]())


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_need_whole_variables_are_not_split(name) -> None:
    assert not can_split(WHOLE[name]())
    *_, group, _, _ = compare(WHOLE[name](), split=True, rtol=1e-5)
    assert all(part.rows is None for part in group.shards)
    assert {part.server for part in group.shards} == {0, 1}


@keras.saving.register_keras_serializable()
class Normalizing(keras.optimizers.SGD):
    """Divides gradients by the norm of all of them."""

    def apply(self, grads, trainable_variables=None):
        norm = keras.ops.sqrt(sum(keras.ops.sum(g * g) for g in grads))
        return super().apply([g / norm for g in grads], trainable_variables)


@keras.saving.register_keras_serializable()
class OneByOne(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(keras.ops.sign(gradient), variable, learning_rate)


TOGETHER = {
    "accumulated": lambda: keras.optimizers.Adam(
        0.1, global_clipnorm=0.5, gradient_accumulation_steps=3
    ),
    "own class": lambda: Normalizing(0.1),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_optimizers_that_need_all_gradients_have_one_server(name, caplog) -> None:
    *_, group, _, _ = compare(TOGETHER[name](), split=True, rtol=1e-5)
    assert {part.server for part in group.shards} == {0}
    assert "needs all gradients at once" in caplog.text


def test_optimizers_that_need_whole_gradients_are_spread() -> None:
    clipped = keras.optimizers.SGD(0.5, clipnorm=0.3, gradient_accumulation_steps=2)
    for optimizer in (clipped, OneByOne(0.1)):
        *_, group, _, _ = compare(optimizer, split=True, rtol=1e-5)
        assert all(part.rows is None for part in group.shards)
        assert {part.server for part in group.shards} == {0, 1}


def test_accumulated_gradients_are_clipped_by_the_server() -> None:
    optimizer = keras.optimizers.SGD(0.3, clipvalue=0.1, gradient_accumulation_steps=2)
    compare(optimizer, split=True)


@pytest.mark.parametrize("clip", ["global_clipnorm", "clipnorm", "clipvalue"])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_workers_clip_by_norms_over_all_servers(clip, scale) -> None:
    optimizer = keras.optimizers.SGD(0.5, **{clip: 0.3}, loss_scale_factor=scale)
    _, group, _, _ = compare(optimizer, split=True)
    assert {part.server for part in group.shards} == {0, 1}
    assert any(part.rows is not None for part in group.shards)


@pytest.mark.parametrize("by", ["names", "variables"])
def test_servers_apply_the_exclusion_from_weight_decay(by) -> None:
    def exclude(trained):
        if by == "names":
            return {"var_names": ["bias"]}
        return {"var_list": [trained[1], trained[2]]}

    optimizer = keras.optimizers.AdamW(0.01, weight_decay=2.0)
    _, group, _, _ = compare(optimizer, exclude=exclude, split=True)
    assert group.rule["no_weight_decay"] == ([1] if by == "names" else [1, 2])


def test_constraints_are_applied_as_in_keras() -> None:
    constraint = keras.constraints.MaxNorm(0.5, axis=0)
    _, _, _, states = compare(
        keras.optimizers.Adam(0.5), constraint=constraint, split=True
    )
    kernel = np.asarray(states[0][0]["float32"])[:24].reshape(6, 4)
    assert np.linalg.norm(kernel, axis=0).max() <= 0.5 + 1e-5


def test_servers_start_from_the_learning_rate_and_iterations() -> None:
    rng = np.random.default_rng(2)
    trained = variables(rng)
    optimizer = keras.optimizers.SGD(SCHEDULE)
    optimizer.build(trained)
    gradients = [np.ones(s, "float32") for s in SHAPES.values()]
    for _ in range(4):
        optimizer.apply(gradients)
    group = grouped(optimizer_rule(optimizer, trained), trained)
    rule = ServerOptimizer(group, 0)
    vectors, state = rule.start(flat(group, 0, trained))
    vectors, state = rule.apply(vectors, state, flat(group, 0, gradients))
    optimizer.apply(gradients)
    np.testing.assert_allclose(vectors["float32"][:4], np.ravel(trained[0])[:4])
    assert rule.slots(state)["iteration", None] == 5

    optimizer = keras.optimizers.SGD(0.5)
    optimizer.learning_rate = 0.25
    config = optimizer_rule(optimizer, trained)["config"]
    assert config["config"]["learning_rate"] == 0.25


def test_slots_are_listed_by_shard() -> None:
    local, group, rules, states = compare(
        keras.optimizers.Adam(0.1, use_ema=True), split=True
    )
    seen = 0
    for server, (rule, (_, state)) in enumerate(zip(rules, states, strict=True)):
        slots = rule.slots(state)
        assert slots["iteration", None] == STEPS
        assert slots["learning_rate", None] == np.float32(0.1)
        for i, part in enumerate(group.shards_on(server)):
            own = {name: value for (name, at), value in slots.items() if at == i}
            assert set(own) == {"momentum", "velocity", "average"}
            rows = slice(None) if part.rows is None else slice(*part.rows)
            for name, value in own.items():
                expected = next(
                    v
                    for v in local.variables
                    if v.name == f"{part.path.replace('/', '_')}_{name}"
                )
                expected = np.asarray(expected)
                expected = expected[rows] if expected.ndim else expected
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)
                seen += 1
        # And back: the inverse.
        again = rule.slots(rule.with_slots(rule.start(states[server][0])[1], slots))
        jax.tree.map(np.testing.assert_array_equal, again, slots)
    assert seen == 3 * len(group.shards)


def test_slots_of_one_shard_are_set_alone() -> None:
    rule = optimizer_rule(keras.optimizers.Adam(0.1), [])
    infos = [VariableInfo(path=p, shape=(2,), dtype="float32") for p in "abc"]
    one = ServerOptimizer(place("three", rule, infos, 1), 0)
    _, state = one.start({"float32": np.zeros(6, "f4")})
    key = SlotKey("momentum", 1)  # In the middle of a fused span.
    changed = one.slots(one.with_slots(state, {key: np.array([3.0, 4.0])}))
    before = one.slots(state)
    assert changed.pop(key).tolist() == [3, 4]
    assert before.pop(key).tolist() == [0, 0]
    jax.tree.map(np.testing.assert_array_equal, changed, before)


def test_bfloat16_gradients_and_several_dtypes() -> None:
    infos = [
        VariableInfo(path="a", shape=(3,), dtype="float32"),
        VariableInfo(path="b", shape=(2,), dtype="bfloat16"),
        VariableInfo(path="c", shape=(1,), dtype="float32"),
    ]
    rule = optimizer_rule(keras.optimizers.SGD(0.5), [])
    group = place("mixed", rule, infos, 1)
    one = ServerOptimizer(group, 0)
    bf16 = jax.numpy.bfloat16
    vectors, state = one.start(
        {"float32": np.zeros(4, "f4"), "bfloat16": np.ones(2, bf16)}
    )
    half = {"float32": np.ones(4, bf16), "bfloat16": np.ones(2, bf16)}
    vectors, state = one.apply(vectors, state, half)
    assert vectors["float32"].dtype == np.float32
    assert vectors["float32"].tolist() == [-0.5] * 4
    assert vectors["bfloat16"].dtype == bf16
    assert vectors["bfloat16"].tolist() == [0.5] * 2


def test_returned_vectors_do_not_change_and_arguments_are_copied() -> None:
    trained = variables(np.random.default_rng(3))
    group = grouped(optimizer_rule(keras.optimizers.Adam(0.5), trained), trained)
    rule = ServerOptimizer(group, 0)
    mine = np.zeros(33, np.float32)
    vectors, state = rule.start({"float32": mine})
    mine[:] = 7
    handed = np.asarray(vectors["float32"])
    before = handed.copy()
    for _ in range(3):
        vectors, state = rule.apply(vectors, state, {"float32": np.ones(33, "f4")})
    np.testing.assert_array_equal(handed, before)
    assert not handed.any()


@pytest.mark.parametrize("make", [keras.optimizers.Adam, keras.optimizers.Lamb])
def test_slots_are_updated_in_their_own_memory(make) -> None:
    trained = variables(np.random.default_rng(3))
    rule = ServerOptimizer(grouped(optimizer_rule(make(0.5), trained), trained), 0)
    vectors, state = rule.start({"float32": np.zeros(33, np.float32)})
    lowered = rule._compiled.lower(vectors, state, vectors)
    compiled = lowered.compile()
    slots = sum(slot.nbytes for slot in state)
    assert compiled.memory_analysis().alias_size_in_bytes == slots
    text = compiled.as_text()
    assert not [x for x in text.splitlines() if " copy(" in x and "f32[" in x]


def test_variables_of_equal_paths_are_kept_apart() -> None:
    infos = [VariableInfo(path="w", shape=(2,), dtype="float32")] * 2
    rule = optimizer_rule(keras.optimizers.SGD(0.5, momentum=0.5), [])
    one = ServerOptimizer(place("twins", rule, infos, 1), 0)
    vectors, state = one.start({"float32": np.zeros(4, "f4")})
    gradient = {"float32": np.array([1, 1, 2, 2], "f4")}
    _, state = one.apply(vectors, state, gradient)
    slots = one.slots(state)
    momenta = [slots["momentum", i].tolist() for i in range(2)]
    assert momenta == [[-0.5, -0.5], [-1.0, -1.0]]


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_unsupported_optimizers_are_refused() -> None:
    sgd = keras.optimizers.SGD
    with pytest.raises(ValueError, match=r"LossScaleOptimizer.*loss_scale_factor"):
        optimizer_rule(keras.optimizers.LossScaleOptimizer(sgd()), [])
    if hasattr(keras.optimizers, "MultiOptimizer"):
        from keras.src.optimizers.multi_optimizer import OptimizerMap

        several = keras.optimizers.MultiOptimizer(OptimizerMap(sgd()))
        with pytest.raises(ValueError, match=r"MultiOptimizer.*applies each"):
            optimizer_rule(several, [])
    with pytest.raises(ValueError, match=r"cannot build SGD.*LearningRateSchedule"):
        optimizer_rule(sgd(lambda: 0.1), [])
    with pytest.raises(ValueError, match=r"cannot build SGD.*get_config"):
        optimizer_rule(sgd(keras.optimizers.schedules.LearningRateSchedule()), [])

    info = [VariableInfo(path="w", shape=(2,), dtype="float32")]
    values = {"float32": np.zeros(2, "f4")}
    with pytest.raises(ValueError, match=r"'w'.*kind='sparse'.*'add' or 'optimizer'"):
        ServerOptimizer(place("w", {"kind": "sparse"}, info, 1), 0)
    config = optimizer_rule(sgd(), [])["config"] | {"class_name": "Nonsense"}
    rule: ServerOptimizer = ServerOptimizer(
        place("w", {"kind": "optimizer", "config": config}, info, 1), 0
    )
    with pytest.raises(ValueError, match=r"cannot be built.*register your own"):
        rule.start(values)
    config = keras.saving.serialize_keras_object(keras.layers.Dense(1))
    rule = ServerOptimizer(
        place("w", {"kind": "optimizer", "config": config}, info, 1), 0
    )
    with pytest.raises(ValueError, match=r"config of a Dense, expected"):
        rule.start(values)


# Neighbouring shards are updated as one.

NOT_NEGATIVE = keras.constraints.serialize(keras.constraints.NonNeg())
DRAWN_SHARDS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), max_size=2).map(tuple),
        st.sampled_from(["float32", "float16"]),
        st.sampled_from([None, NOT_NEGATIVE]),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(database=None, max_examples=30)
@given(DRAWN_SHARDS)
def test_each_shard_is_updated_with_its_own_gradient_and_slots(drawn) -> None:
    shards = [
        VariableShard(
            variable=i,
            path=f"v{i}",
            shape=shape,
            dtype=dtype,
            server=0,
            constraint=constraint,
        )
        for i, (shape, dtype, constraint, _) in enumerate(drawn)
    ]
    rule = optimizer_rule(keras.optimizers.SGD(1.0, momentum=0.5), [])
    rule["no_weight_decay"] = [i for i, each in enumerate(drawn) if each[-1]]
    group = VariableGroup(name="g", rule=rule, shards=tuple(shards))
    optimizer = ServerOptimizer(group, 0)
    lengths = group.lengths_on(0)
    gradients = {d: np.arange(n, dtype=d) for d, n in lengths.items()}
    values, state = optimizer.start({d: 2 * g for d, g in gradients.items()})
    values, state = optimizer.apply(values, state, gradients)
    for dtype, gradient in gradients.items():
        np.testing.assert_array_equal(values[dtype], gradient)

    starts = dict.fromkeys(lengths, 0)
    slots = optimizer.slots(state)
    for i, shard in enumerate(shards):
        start = starts[shard.dtype]
        starts[shard.dtype] = start + shard.size
        expected = -gradients[shard.dtype][start : start + shard.size]
        momentum = slots[SlotKey("momentum", i)]
        np.testing.assert_array_equal(momentum, expected.reshape(shard.shape))
    changed = {
        SlotKey("momentum", i): np.full(p.shape, i) for i, p in enumerate(shards)
    }
    again = optimizer.slots(optimizer.with_slots(state, changed))
    for key, value in changed.items():
        np.testing.assert_array_equal(again[key], value)
    assert {k for k in slots if k.shard is not None} == set(changed)
