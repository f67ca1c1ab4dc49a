import subprocess
import sys
import threading
import time
from collections import OrderedDict, namedtuple
from typing import Any

import grain
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.input.sources import batches, is_arrays, num_batches

X = np.arange(20, dtype=np.float32).reshape(10, 2)
Y = np.arange(10)


class Sequence(keras.utils.PyDataset):
    """Batches of 4 rows of X and Y; records the calls and threads."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls, self.threads = [], set()

    def __len__(self):
        return 3

    def __getitem__(self, index) -> Any:
        self.threads.add(threading.current_thread())
        time.sleep(0.01 * (2 - index))  # The first takes longest.
        self.calls.append(index)
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


def generate():
    for start in range(0, 10, 4):
        yield X[start : start + 4], Y[start : start + 4]


def as_dict(batch):
    return {"x": batch[0], "y": batch[1]}


def grain_map():
    source = grain.MapDataset.source(range(10))
    return source.map(lambda i: (X[i], Y[i])).batch(4)


def grain_loader():
    class Examples:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return X[index], Y[index]

    return grain.DataLoader(
        data_source=Examples(),
        sampler=grain.samplers.SequentialSampler(10, grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )


class Iterable:
    def __iter__(self):
        return generate()


DATASETS = {
    "grain.MapDataset": grain_map,
    "grain.IterDataset": lambda: grain_map().to_iter_dataset(),
    "grain.DataLoader": grain_loader,
    "PyDataset": Sequence,
    "PyDataset in threads": lambda: Sequence(workers=3),
    "generator function": lambda: generate,
    "callable": lambda: grain_map,
    "iterable": Iterable,
    "list": lambda: list(generate()),
}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
def test_each_epoch_has_the_same_batches(make):
    dataset = make()
    for _ in range(2):
        result = list(batches(dataset))
        assert len(result) == 3
        for (x, y), (expected_x, expected_y) in zip(result, generate(), strict=True):
            assert isinstance(x, np.ndarray)
            np.testing.assert_array_equal(x, expected_x)
            np.testing.assert_array_equal(y, expected_y)


@pytest.mark.parametrize(
    ("dataset", "number"),
    [
        (grain_map(), 3),
        (Sequence(), 3),
        (list(generate()), 3),
        (generate, None),
        (Iterable(), None),
        (generate(), None),
        (grain.MapDataset.range(8).repeat().batch(1024), None),
        (grain_map().to_iter_dataset(), None),
    ],
)
def test_length(dataset, number):
    assert num_batches(dataset) == number


# Arrays


@pytest.mark.parametrize("kind", [tuple, as_dict, lambda pair: pair[0]])
def test_arrays_are_sliced_without_a_copy(kind):
    arrays = kind((X, Y))
    result = list(batches(arrays, 4))
    assert len(result) == num_batches(arrays, 4) == 3
    leaves = [jax.tree.leaves(batch) for batch in result]
    for array, *slices in zip(jax.tree.leaves(arrays), *leaves, strict=True):
        assert [len(part) for part in slices] == [4, 4, 2]
        np.testing.assert_array_equal(np.concatenate(slices), array)
        assert all(np.shares_memory(part, array) for part in slices)


def test_nested_arrays_and_jax_arrays():
    Batch = namedtuple("Batch", "inputs targets")
    arrays = Batch(OrderedDict(a=jnp.asarray(X), b=[X, X]), Y)
    assert is_arrays(arrays)
    first = next(batches(arrays, 5))
    assert isinstance(first, Batch)
    assert isinstance(first.inputs["a"], jax.Array)
    assert first.inputs["b"][1].shape == (5, 2)


def test_arrays_need_a_batch_size():
    with pytest.raises(ValueError, match=r"Pass batch_size=\.\.\."):
        batches((X, Y))
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        batches((X, Y), 0)


def test_datasets_take_no_batch_size():
    with pytest.raises(ValueError, match=r"batch_size=4 with a Sequence.*Remove"):
        batches(Sequence(), 4)


def test_jax_arrays_on_many_devices_come_to_the_host():
    mesh = Mesh(np.array(jax.devices()[:2]), ("replica",))
    sharding = NamedSharding(mesh, PartitionSpec("replica"))
    x = jax.device_put(X, sharding)
    assert isinstance(next(batches(x, 5)), np.ndarray)
    assert isinstance(next(batches([x])), np.ndarray)


# Iterators


@pytest.mark.parametrize("make", [generate, lambda: map(np.asarray, [X, X])])
def test_second_epoch_of_an_iterator_is_an_error(make):
    iterator = make()
    assert len(list(batches(iterator))) > 0
    with pytest.raises(RuntimeError, match=r"only once.*callable"):
        list(batches(iterator))


def test_closing_closes_the_generator():
    closed = []

    def source():
        try:
            while True:
                yield X
        finally:
            closed.append(True)

    iterator = batches(source)
    next(iterator)
    iterator.close()
    assert closed == [True]


# Keras' PyDataset


def test_epoch_methods_of_a_py_dataset_are_called():
    dataset = Sequence()
    list(batches(dataset))
    assert dataset.calls == ["begin", 0, 1, 2, "end"]
    assert dataset.threads == {threading.current_thread()}
    dataset = Sequence()
    iterator = batches(dataset)
    next(iterator)
    iterator.close()
    assert dataset.calls == ["begin", 0, "end"]


def test_py_dataset_workers_are_threads():
    dataset = Sequence(workers=2, use_multiprocessing=True)
    list(batches(dataset))
    assert threading.current_thread() not in dataset.threads
    assert not any(thread.is_alive() for thread in dataset.threads)


def test_endless_py_dataset_in_threads_ends_when_closed():
    class Endless(Sequence):
        def __getitem__(self, index):
            self.threads.add(threading.current_thread())
            return [X + index, Y]

        @property
        def num_batches(self):  # pyright: ignore[reportIncompatibleMethodOverride]
            return None

    dataset = Endless(workers=2, max_queue_size=3)
    assert num_batches(dataset) is None
    iterator = batches(dataset)
    for index in range(20):
        batch = next(iterator)
        assert isinstance(batch, tuple)  # Keras converts lists, too.
        np.testing.assert_array_equal(batch[0], X + index)
    iterator.close()
    assert not any(thread.is_alive() for thread in dataset.threads)


# Invalid datasets and batches


@pytest.mark.parametrize("dataset", [3, None, "file.npz", {"x": [1, 2]}, {}])
def test_values_that_are_no_dataset(dataset):
    with pytest.raises(TypeError, match=r"dataset: got .* expected arrays"):
        batches(dataset)


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        ("cat", "str"),
        (np.array(["cat", "dog"]), "array of <U3"),
        (np.array([{}, {}]), "array of object"),
        (np.array([0], "M8[s]"), "array of datetime64"),
        (object(), "object"),
    ],
)
def test_leaves_that_are_not_numbers_are_named(leaf, kind):
    with pytest.raises(TypeError, match=rf"leaf \['y'\]\[0\] has type {kind}"):
        next(batches([{"x": X, "y": (leaf,)}]))


# Libraries that may not be installed


def test_import_loads_no_library():
    # Skip the parent package, which may import other libraries.
    code = """
import importlib.util, sys, types
path = importlib.util.find_spec("replicax").submodule_search_locations
sys.modules["replicax"] = types.ModuleType("replicax")
sys.modules["replicax"].__path__ = path
import replicax.input
print({"grain", "tensorflow", "torch", "keras"} & set(sys.modules))
"""
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.strip() == "set()"


def test_tf_data():
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(4)
    assert num_batches(dataset) == 3
    assert num_batches(dataset.repeat()) is None
    for _ in range(2):
        result = list(batches(dataset))
        assert len(result) == 3
        for batch, (x, y) in zip(result, generate(), strict=True):
            assert isinstance(batch["x"], np.ndarray)
            np.testing.assert_array_equal(batch["x"], x)
            np.testing.assert_array_equal(batch["y"], y)
    words = tf.data.Dataset.from_tensor_slices(["cat", "dog"]).batch(2)
    with pytest.raises(TypeError, match="the batch has type array of object"):
        list(batches(words))
    assert next(batches((tf.constant(X), tf.constant(Y)), 4))[0].shape == (4, 2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torch_data_loader(num_workers):
    torch = pytest.importorskip("torch")
    data = torch.utils.data
    examples = data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    # torch forks its workers, which Python and JAX warn about in a threaded process.
    context = "spawn" if num_workers else None
    loader = data.DataLoader(
        examples, batch_size=4, num_workers=num_workers, multiprocessing_context=context
    )
    assert num_batches(loader) == 3
    for _ in range(2):
        for batch, (x, y) in zip(batches(loader), generate(), strict=True):
            assert isinstance(batch, tuple)
            assert isinstance(batch[0], np.ndarray)
            np.testing.assert_array_equal(batch[0], x)
            np.testing.assert_array_equal(batch[1], y)
