"""Tables: rows that start and are updated as Keras would, wherever they lie."""

import keras
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax.ps.row_initializers import fill_rows
from replicax.ps.table import Table, TableError, TableSpec

DIM = 3
UNIFORM = keras.initializers.serialize(keras.initializers.get("uniform"))


def spec_of(optimizer=None, *, num_rows=20, initializer=UNIFORM, **rule):
    config = keras.optimizers.serialize(optimizer or keras.optimizers.SGD(0.1))
    return TableSpec(
        name="words",
        num_rows=num_rows,
        dim=DIM,
        seed=7,
        initializer=initializer,
        rule={"kind": "optimizer", "config": config, **rule},
    )


def whole(table):
    return table.rows(np.arange(table.spec.num_rows))


def push(table, ids, gradients, sequence, worker="worker:0", session="a"):
    return table.push_rows(
        np.asarray(ids),
        np.asarray(gradients, np.float32),
        worker=worker,
        session=session,
        sequence=sequence,
    )


# First values.


@pytest.mark.parametrize(
    ("initializer", "mean", "stddev", "limit"),
    [
        ("uniform", 0, 0.05 / 3**0.5, 0.05),
        (keras.initializers.RandomUniform(1, 3), 2, 1 / 3**0.5, 3),
        (keras.initializers.RandomNormal(1.0, 0.1), 1, 0.1, None),
        (keras.initializers.TruncatedNormal(0.0, 1.0), 0, 0.88, 2),
        ("zeros", 0, 0, 0),
        ("ones", 1, 0, 1),
        (keras.initializers.Constant(0.25), 0.25, 0, 0.25),
    ],
)
def test_initializers_are_those_of_keras(initializer, mean, stddev, limit):
    config = keras.initializers.serialize(keras.initializers.get(initializer))
    values = np.empty((30_000, 4), np.float32)
    fill_rows(values, config, seed=1)
    np.testing.assert_allclose(values.mean(), mean, atol=0.02)
    np.testing.assert_allclose(values.std(), stddev, rtol=0.02, atol=1e-6)
    if limit is not None:
        assert np.abs(values).max() <= limit


@given(
    num_rows=st.integers(1, 10_000),
    num_servers=st.integers(1, 5),
    kind=st.sampled_from(["RandomUniform", "RandomNormal", "TruncatedNormal"]),
)
@settings(max_examples=30)
def test_a_row_starts_alike_on_any_number_of_servers(num_rows, num_servers, kind):
    config = {"class_name": kind, "config": {}}
    longer = np.empty((10_000, 2), np.float32)
    fill_rows(longer, config, seed=5)
    for server in range(num_servers):
        share = np.empty((len(range(server, num_rows, num_servers)), 2), np.float32)
        fill_rows(share, config, 5, server, num_servers)
        np.testing.assert_array_equal(share, longer[:num_rows][server::num_servers])


def test_rows_differ_and_depend_on_the_seed():
    config = {"class_name": "RandomUniform", "config": {}}
    a, b = np.empty((9000, 2), np.float32), np.empty((9000, 2), np.float32)
    fill_rows(a, config, 1)
    fill_rows(b, config, 2)
    assert len(np.unique(a[:, 0])) > 8900  # Of 2**24 numbers.
    assert (a != b).mean() > 0.99


@pytest.mark.parametrize(
    ("initializer", "message"),
    [
        ("glorot_uniform", "'GlorotUniform', which needs the whole table"),
        (keras.initializers.Constant([1.0, 2.0]), "takes one number"),
    ],
)
def test_other_initializers_are_refused(initializer, message):
    config = keras.initializers.serialize(keras.initializers.get(initializer))
    with pytest.raises(TableError, match=message):
        spec_of(initializer=config)


# Updates.

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "centered": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.1,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.01,
        l2_shrinkage_regularization_strength=0.01,
        beta=0.1,
    ),
    "decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.5),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=1.0),
    "scaled": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(
            0.01, 20, warmup_target=0.1, warmup_steps=5
        )
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_keras_where_every_row_is_touched(name):
    # Far from zero, so that a relative error means something.
    initializer = {
        "class_name": "RandomUniform",
        "config": {"minval": 1.0, "maxval": 2.0},
    }
    table = Table(spec_of(OPTIMIZERS[name](), initializer=initializer))
    variable = keras.Variable(whole(table))
    optimizer = OPTIMIZERS[name]()
    ids = np.random.default_rng(0).permutation(table.spec.num_rows)
    rng = np.random.default_rng(1)
    for i in range(12):
        gradients = rng.standard_normal((len(ids), DIM)).astype("float32")
        push(table, ids, gradients[ids], i)
        optimizer.apply([keras.ops.convert_to_tensor(gradients)], [variable])
    np.testing.assert_allclose(whole(table), variable.numpy(), rtol=1e-6, atol=1e-6)
    assert table.version == 12


def test_only_pushed_rows_and_their_slots_change():
    table = Table(spec_of(keras.optimizers.Adam(0.1, weight_decay=0.1)))
    push(table, np.arange(20), np.ones((20, DIM)), 0)
    before, _ = table.state()
    push(table, [3, 5], np.ones((2, DIM)), 1)
    after, _ = table.state()
    for name, array in after.items():
        changed = (array != before[name]).any(axis=1)
        assert np.flatnonzero(changed).tolist() == [3, 5], name


def test_a_row_is_updated_lazily():
    """Adam on one row: as Keras on that row alone, but for the number of updates."""
    table = Table(spec_of(keras.optimizers.Adam(0.1)))
    start = whole(table)[3]
    push(table, [0], np.ones((1, DIM)), 0)
    push(table, [3], np.full((1, DIM), 2), 1)
    m, v = 0.1 * 2, 0.001 * 4
    alpha = 0.1 * np.sqrt(1 - 0.999**2) / (1 - 0.9**2)
    np.testing.assert_allclose(
        whole(table)[3], start - alpha * m / (np.sqrt(v) + 1e-7), rtol=1e-4
    )


@given(ids=st.lists(st.integers(0, 19), max_size=30), num_servers=st.integers(1, 4))
@settings(max_examples=30)
def test_duplicates_are_summed_first_and_servers_make_no_difference(ids, num_servers):
    spec = spec_of(keras.optimizers.Adagrad(0.1))
    ids = np.array(ids, np.int64)
    gradients = np.random.default_rng(0).standard_normal((len(ids), DIM))
    tables = [
        Table(spec, server=i, num_servers=num_servers) for i in range(num_servers)
    ]
    dense = np.zeros((20, DIM))
    np.add.at(dense, ids, gradients)
    one = Table(spec)
    expected = whole(one)
    touched = np.unique(ids)
    square = 0.1 + dense**2
    expected[touched] -= (0.1 * dense / np.sqrt(square + 1e-7))[touched]
    for i, table in enumerate(tables):
        here = ids % num_servers == i
        push(table, ids[here], gradients[here], 0)
        mine = np.arange(i, 20, num_servers)
        np.testing.assert_allclose(
            table.rows(mine), expected[mine], rtol=1e-4, atol=1e-6
        )
        assert table.version == 1  # Even with no row here.


@pytest.mark.parametrize(
    ("optimizer", "num_servers", "message"),
    [
        (keras.optimizers.Lamb(), 1, "by 'Lamb'. Compile the model with one of SGD"),
        (keras.optimizers.SGD(use_ema=True), 1, r"SGD\(use_ema=True\)"),
        (
            keras.optimizers.Adam(gradient_accumulation_steps=2),
            1,
            "gradient_accumulation_steps=2",
        ),
        (keras.optimizers.SGD(global_clipnorm=1.0), 1, "use clipvalue"),
        (keras.optimizers.SGD(clipnorm=1.0), 2, "several servers; use clipvalue"),
    ],
)
def test_optimizers_that_need_all_rows_are_refused(optimizer, num_servers, message):
    with pytest.raises(TableError, match=message):
        Table(spec_of(optimizer), num_servers=num_servers)


# Requests that do not fit.


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 20, 30], "'words': id 20 at position 1 is not one of its rows 0 to 19"),
        ([-1], "id -1 at position 0"),
        ([1.0], "got ids of dtype float64"),
        ([[1]], r"shape \(1, 1\)"),
    ],
)
def test_bad_ids_are_named(ids, message):
    table = Table(spec_of())
    before = whole(table)
    with pytest.raises(TableError, match=message):
        table.rows(np.array(ids))
    with pytest.raises(TableError, match=message):
        push(table, ids, np.ones((len(ids), DIM)), 0)
    np.testing.assert_array_equal(whole(table), before)


def test_rows_of_another_server_are_refused():
    table = Table(spec_of(), server=1, num_servers=2)
    with pytest.raises(TableError, match="id 4 at position 1 lies on server 0, not on"):
        table.rows(np.array([3, 4]))


def test_the_learning_rate_can_be_set():
    zeros = {"class_name": "Zeros"}
    table, other = Table(spec_of(initializer=zeros)), Table(spec_of(initializer=zeros))
    table.set_learning_rate(2.0)
    other.load_state(*table.state())
    for each in (table, other):
        push(each, [1], np.ones((1, DIM)), 0)
        np.testing.assert_array_equal(each.rows(np.array([1])), -2)
    scheduled = Table(spec_of(OPTIMIZERS["schedule"]()))
    with pytest.raises(TableError, match="CosineDecay"):
        scheduled.set_learning_rate(1.0)
    with pytest.raises(TableError, match="learning_rate=nan"):
        table.set_learning_rate(float("nan"))


def test_a_spec_survives_json():
    spec = spec_of(keras.optimizers.Adam())
    assert TableSpec(**msgspec.to_builtins(spec)) == spec
    assert spec.fits(msgspec.structs.replace(spec, seed=9))
    assert not spec.fits(msgspec.structs.replace(spec, dim=9))


def test_a_server_without_rows_accepts_pushes():
    table = Table(spec_of(num_rows=2), server=2, num_servers=3)
    assert table.rows(np.empty(0, np.int64)).shape == (0, DIM)
    push(table, np.empty(0, np.int64), np.empty((0, DIM)), 0)
    assert table.version == 1
