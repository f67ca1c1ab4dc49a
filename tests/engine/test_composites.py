"""Composite arrays in datasets, and as arguments and results of `run`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse
from tests.conftest import mirrored, values_of

import replicax as rx

_RNG = np.random.default_rng(0)
X = (_RNG.normal(size=(21, 6)) * (_RNG.random((21, 6)) < 0.3)).astype("float32")
X[4:8] = 0
NUMBERS = np.arange(21, dtype="float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Quantised:
    """A user's composite array: numbers and their scale."""

    numbers: Any
    scale: Any

    @property
    def shape(self):
        return self.numbers.shape

    @property
    def dtype(self):
        return np.dtype("float32")


@jax.tree_util.register_pytree_node_class
class Variable:
    """Like Flax' `nnx.Variable`: a node around one array, with its attributes."""

    def __init__(self, value):
        self.value = value

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "value"), name)

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def distributed(data, num_replicas=4, **options):
    options = {"batch_size": 8} | options
    return mirrored(num_replicas).experimental_distribute_dataset(data, **options)


def dense(value):
    """All replicas' rows of a `PerReplica` of sparse arrays."""
    return np.concatenate([np.asarray(x.todense()) for x in value.values])


KINDS = {
    "csr": scipy.sparse.csr_matrix,
    "csc": scipy.sparse.csc_array,
    "coo": scipy.sparse.coo_array,
    "bcoo": sparse.BCOO.fromdense,
    "bcoo of rows": lambda x: sparse.BCOO.fromdense(x, n_batch=1),
}


@pytest.mark.slow(but=["drop-csr", "pad-bcoo of rows"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_datasets_cut_rows(kind, remainder):
    """21 rows: two batches of 8 and one of 5, or of 5 and three copies."""
    dataset = distributed((KINDS[kind](X), NUMBERS), remainder=remainder)
    steps = list(dataset)
    if remainder == "pad":
        steps = [step for step, _ in steps]
    x = np.concatenate([dense(step[0]) for step in steps])
    rows = np.concatenate([np.asarray(step[1]).ravel() for step in steps]).astype(int)
    assert rows[:20].tolist() == list(range(20))
    np.testing.assert_array_equal(x, X[rows])
    spec = dataset.element_spec[0] if remainder == "pad" else dataset.element_spec
    assert spec[0] == jax.ShapeDtypeStruct((2, 6), "float32")


class SparseTensorValue(NamedTuple):
    """A sparse tensor, as `tf.data.Dataset.as_numpy_iterator` yields it."""

    indices: np.ndarray
    values: np.ndarray
    dense_shape: np.ndarray


SparseTensorValue.__module__ = "tensorflow.python.framework.sparse_tensor"


def test_sparse_tensors_of_tensorflow():
    indices = np.argwhere(X[:8])
    tensor = SparseTensorValue(indices, X[tuple(indices.T)], np.array([8, 6]))
    (batch,) = distributed(lambda: [(tensor, NUMBERS[:8])], batch_size=None)
    np.testing.assert_array_equal(dense(batch[0]), X[:8])


@pytest.mark.slow(but=["0-1", "2-1", "0-3"])
@pytest.mark.parametrize(
    ("n_batch", "n_dense"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (0, 3)]
)
def test_sparse_arrays_of_more_dimensions(n_batch, n_dense):
    images = np.where(np.arange(48).reshape(8, 2, 3) % 5 < 3, 0, 1.0)
    array = sparse.BCOO.fromdense(images, n_batch=n_batch, n_dense=n_dense)
    (batch,) = distributed(lambda: [array], batch_size=None)
    if n_batch + n_dense == 3:
        np.testing.assert_array_equal(np.concatenate(list(batch.values)), images)
    else:
        np.testing.assert_array_equal(dense(batch), images)
        assert {x.n_batch for x in batch.values} == {0}


def test_batches_of_one_replica_each():
    def batches(context):
        for start in range(0, 12, 3):
            yield scipy.sparse.csr_array(X[start : start + 3])

    strategy = mirrored(2)
    steps = list(strategy.distribute_datasets_from_function(batches))
    np.testing.assert_array_equal(np.concatenate([*map(dense, steps)]), X[:12])


def test_run_takes_sparse_arrays():
    strategy = mirrored(4)
    (x, _), *_ = distributed((scipy.sparse.csr_matrix(X), NUMBERS))
    assert repr(x) == "PerReplica(BCOO float32[4, 2, 6])"
    devices = [value.data.devices() for value in x.values]
    assert devices == [{device} for device in jax.devices()[:4]]

    def step(x):
        assert type(x) is sparse.BCOO
        assert (x.n_batch, x.shape) == (0, (2, 6))
        return x.todense().sum(1)

    sums = np.asarray(strategy.run(step, (x,)))
    np.testing.assert_allclose(sums.ravel(), X[:8].sum(1), rtol=1e-5)


def test_whole_sparse_arrays_go_to_every_replica():
    out = mirrored(2).run(lambda x: x @ jnp.ones(6), (sparse.BCOO.fromdense(X),))
    for value in values_of(out):
        np.testing.assert_allclose(value, X.sum(1), rtol=1e-5)


def test_sparse_arrays_of_other_kinds_are_refused():
    with pytest.raises(TypeError, match=r"run: got a csr_array float32.*BCOO"):
        mirrored(2).run(print, (scipy.sparse.csr_array(X),))
    with pytest.raises(TypeError, match=r"is a BCSR float32.*BCOO"):
        next(iter(distributed(sparse.BCSR.fromdense(X))))


@pytest.mark.parametrize(
    "use",
    [
        lambda strategy, x: strategy.run(lambda x: x * 2.0, (x,)),
        lambda strategy, x: strategy.reduce("sum", x, axis=None),
        lambda strategy, x: strategy.gather(x, axis=0),
        *(
            lambda strategy, x, call=call: strategy.run(
                lambda x: call(rx.get_replica_context(), x), (x,)
            )
            for call in (
                lambda context, x: context.all_reduce("sum", {"x": x}),
                lambda context, x: context.all_gather(x, 0),
                lambda context, x: context.merge_call(print, (x,)),
            )
        ),
    ],
    ids=["run", "reduce", "gather", "all_reduce", "all_gather", "merge_call"],
)
def test_values_of_replicas_are_dense(use):
    (x, _), *_ = distributed((KINDS["bcoo"](X), NUMBERS))
    with pytest.raises(TypeError, match=r"got BCOO float32.*todense"):
        use(mirrored(4), x)


def test_values_from_a_function():
    """The replicas' sparse arrays have different numbers of entries."""
    strategy = mirrored(4)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: scipy.sparse.csr_array(
            X[context.replica_id_in_sync_group, None]
        )
    )
    np.testing.assert_array_equal(dense(value), X[:4])


def test_other_composite_arrays_are_refused():
    data = Quantised(np.ones((8, 6), "int8"), np.ones(8, "float32"))
    with pytest.raises(TypeError, match=r"leaf \['x'\] is a Quantised float32\[8, 6\]"):
        next(iter(distributed({"x": data, "y": NUMBERS[:8]})))


def test_a_node_around_one_array_is_a_container():
    strategy = mirrored(4)
    (batch,) = distributed(lambda: [Variable(X[:8])], batch_size=None)
    out = strategy.run(lambda x: Variable(x.value * 2), (batch,))
    assert isinstance(out, Variable)
    np.testing.assert_array_equal(np.asarray(out.value).reshape(8, 6), 2 * X[:8])
    total = strategy.reduce("sum", out, axis=0)
    np.testing.assert_allclose(total.value, 2 * X[:8].sum(0), rtol=1e-5)


def test_keys_of_random_numbers_have_rows():
    strategy = mirrored(4)
    keys = jax.random.split(jax.random.key(0), 9)
    for remainder in ("drop", "pad"):
        batch, *_ = distributed(keys, batch_size=9, remainder=remainder)
        batch = batch[0] if remainder == "pad" else batch
        drawn = strategy.run(jax.vmap(jax.random.uniform), (batch,))
        expected = jax.vmap(jax.random.uniform)(keys)
        np.testing.assert_array_equal(np.asarray(drawn).ravel()[:8], expected[:8])
    same = strategy.run(lambda x: x, (batch,))
    assert "key<fry>" in repr(same)
    gathered = jax.random.key_data(strategy.gather(same, 0))
    np.testing.assert_array_equal(gathered[:8], jax.random.key_data(keys)[:8])
    with pytest.raises(TypeError, match=r"got key<fry>\[4, 3\], which has no sum"):
        strategy.reduce("sum", same, axis=None)
    one = strategy.run(jax.random.uniform, (jax.random.key(3),))
    assert float(values_of(one)[3]) == float(jax.random.uniform(jax.random.key(3)))


@pytest.mark.parametrize("rows", [np.array([[1, 2], [3]], object), [[1, 2], [3]]])
def test_ragged_rows_are_refused(rows):
    with pytest.raises((TypeError, ValueError), match=r"pad .*unequal length"):
        next(iter(distributed(lambda: [rows], batch_size=None)))


def test_examples_of_sparse_arrays_cannot_be_batched_again():
    dataset = mirrored(2).experimental_make_numpy_dataset(
        (scipy.sparse.csr_matrix(X), NUMBERS)
    )
    with pytest.raises(TypeError, match=r"float32\[21, 6\].*batch_size"):
        next(iter(dataset.batch(4)))
