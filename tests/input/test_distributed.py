import gc
import logging
import threading
import time

import grain
import jax
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.conftest import mirrored

import replicax as rx
from replicax.engine.values import PerReplica
from replicax.input.context import InputContext
from replicax.input.distributed import DistributedDataset
from replicax.input.from_function import DistributedDatasetFromFunction
from replicax.input.grain_datasets import numpy_dataset

X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.arange(20, dtype=np.int32)


def make_mesh(num_replicas):
    return Mesh(np.array(jax.devices()[:num_replicas]), ("replica",))


@pytest.fixture
def mesh():
    return make_mesh(4)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())  # Such as the thread that writes checkpoints.
    yield
    deadline = time.monotonic() + 10
    names = ("replicax-", "grain-")
    while any(t.name.startswith(names) for t in set(threading.enumerate()) - before):
        assert time.monotonic() < deadline
        gc.collect()  # An abandoned iterator may be a part of a cycle.
        time.sleep(0.002)


def dropped(caplog):
    return [r.message for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_replicas", [1, 2, 4, 8])
def test_replicas_get_consecutive_slices_on_their_devices(num_replicas, prefetch):
    mesh = make_mesh(num_replicas)
    dataset = DistributedDataset(
        {"x": X[:16], "y": Y[:16]}, mesh, batch_size=8, prefetch=prefetch
    )
    assert len(dataset) == 2
    for epoch in range(2):
        steps = list(dataset)
        assert len(steps) == 2, epoch
        for step, batch in enumerate(steps):
            b = 8 // num_replicas
            assert isinstance(batch["x"], PerReplica)
            array = batch["x"].array
            assert array.shape == (num_replicas, b, 3)
            sharding = NamedSharding(mesh, PartitionSpec("replica"))
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
            for i, value in enumerate(batch["y"].values):
                start = 8 * step + b * i
                assert value.devices() == {mesh.devices[i]}
                np.testing.assert_array_equal(value, Y[start : start + b])


def test_generator_object_has_one_epoch(mesh):
    dataset = DistributedDataset((X[i : i + 4] for i in (0, 4, 8)), mesh)
    for _ in dataset:
        break  # The prefetched batches are lost.
    with pytest.raises(RuntimeError, match="and can be iterated only once"):
        list(dataset)


# Remainders


def test_dropped_examples_are_reported_once_per_count(mesh, caplog):
    dataset = DistributedDataset((X, Y), mesh, batch_size=7, remainder="drop")
    assert [batch[0].array.shape[:2] for batch in dataset] == [(4, 1)] * 3
    (message,) = dropped(caplog)
    assert "8 examples" in message  # 3 of 7, 3 of 7, 2 of 6.
    assert "'drop'" in message
    assert "4 replicas" in message
    list(dataset)
    assert len(dropped(caplog)) == 1
    list(DistributedDataset((X, Y), mesh, batch_size=7, remainder="drop"))
    assert len(dropped(caplog)) == 2
    # A last batch of fewer rows than replicas is dropped as a whole.
    dataset = DistributedDataset(X[:18], mesh, batch_size=8, remainder="drop")
    assert len(dataset) == len(list(dataset)) == 2
    assert "2 examples" in dropped(caplog)[2]


@pytest.mark.parametrize("remainder", ["keep", "pad"])
@pytest.mark.parametrize(("num_examples", "batch_size"), [(20, 8), (18, 7), (3, 8)])
def test_no_row_is_dropped(num_examples, batch_size, remainder, mesh, caplog):
    x = X[:num_examples]
    dataset = DistributedDataset(x, mesh, batch_size=batch_size, remainder=remainder)
    steps = list(dataset)
    assert len(dataset) == len(steps) == -(-num_examples // batch_size)
    if remainder == "keep":
        rows = [np.concatenate(batch.values) for batch in steps]
    else:
        for batch, mask in steps:
            assert mask.array.dtype == bool
            assert mask.array.sharding.is_equivalent_to(batch.array.sharding, 2)
        rows = [np.asarray(batch)[np.asarray(mask)] for batch, mask in steps]
    np.testing.assert_array_equal(np.concatenate(rows), x)
    assert dropped(caplog) == []


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("remainder", ["drop", "error"])
def test_fewer_examples_than_replicas(size, remainder, mesh):
    dataset = DistributedDataset(X, mesh, batch_size=size, remainder=remainder)
    with pytest.raises(ValueError, match=f"{size} examples .* 4 replicas"):
        list(dataset)
    dataset = DistributedDataset(X[:size], mesh, batch_size=8, remainder=remainder)
    assert len(dataset) == 1
    with pytest.raises(ValueError, match=f"{size} examples .* 4 replicas"):
        list(dataset)


# Options and mistakes


def test_errors_before_the_first_batch(mesh):
    with pytest.raises(ValueError, match=r"'truncate'.*'keep'.*'drop'.*'pad'.*'error'"):
        DistributedDataset(X, mesh, batch_size=4, remainder="truncate")
    with pytest.raises(ValueError, match=r"prefetch must be at least 0.*got -1"):
        DistributedDataset(X, mesh, batch_size=4, prefetch=-1)
    with pytest.raises(ValueError, match="Pass batch_size"):
        DistributedDataset(X, mesh)
    with pytest.raises(TypeError, match="got int 3"):
        DistributedDataset(3, mesh)


def test_several_replicas_on_a_device(mesh):
    (batch,) = DistributedDataset(X[:16], mesh, batch_size=16, num_replicas=8)
    np.testing.assert_array_equal(batch.array, X[:16].reshape(8, 2, *X.shape[1:]))
    assert [s.data.shape[0] for s in batch.array.addressable_shards] == [2] * 4


def test_unknown_length(mesh):
    dataset = DistributedDataset(lambda: iter([X]), mesh)
    with pytest.raises(TypeError, match="no known length"):
        len(dataset)
    assert dataset  # Truth does not ask for the length.
    assert len(list(dataset)) == 1


def test_a_dataset_is_distributed_once(mesh):
    inner = DistributedDataset([np.ones(4)], mesh)
    for dataset in (inner, iter(inner), lambda: inner):
        with pytest.raises(TypeError, match=r"the batch is PerReplica.*already"):
            next(iter(DistributedDataset(dataset, mesh)))


def test_an_iterator_refuses_replica_functions():
    strategy = mirrored(2)
    iterator = iter(strategy.experimental_distribute_dataset([np.ones(4)]))
    with pytest.raises(rx.ContextError, match=r"args=\(next\(iterator\),\)"):
        strategy.run(lambda: next(iterator).values)
    assert next(iterator).values[0].shape == (2,)  # The iterator kept its batch.


# Values


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (np.float64, np.float32),
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.float16, np.float16),
        (np.uint8, np.uint8),
        (bool, bool),
        (jax.numpy.bfloat16, jax.numpy.bfloat16),
        (np.complex64, np.complex64),
    ],
)
def test_dtypes(source, expected, mesh):
    (batch,) = DistributedDataset([np.ones((4, 2), source)], mesh)
    assert batch.array.dtype == expected
    with jax.enable_x64(True):
        (batch,) = DistributedDataset([np.ones((4, 2), source)], mesh)
        assert batch.array.dtype == source


def test_element_spec_of_one_replica(mesh):
    assert DistributedDataset((X, Y), mesh, batch_size=8).element_spec is None
    dataset = DistributedDataset((X, Y), mesh, batch_size=8)
    next(iter(dataset))
    x, y = dataset.element_spec
    assert (x.shape, x.dtype) == ((2, 3), np.float32)
    assert (y.shape, y.dtype) == ((2,), np.int32)
    dataset = DistributedDataset(X, mesh, batch_size=8, remainder="pad")
    next(iter(dataset))
    assert dataset.element_spec[1].shape == (2,)


@pytest.mark.parametrize("num_replicas", [1, 4])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_source_may_reuse_its_buffer(num_replicas, prefetch):
    def source():
        # Aligned, so that the CPU backend could keep the memory instead of copying.
        buffer = np.zeros((4 * 1024 + 1, 16), np.float32)
        start = -buffer.ctypes.data % 64 // 4
        buffer = buffer.ravel()[start : start + 4096 * 16].reshape(4096, 16)
        for index in range(20):
            buffer[:] = index
            yield buffer

    mesh = make_mesh(num_replicas)
    steps = list(DistributedDataset(source, mesh, prefetch=prefetch))
    for index, batch in enumerate(steps):
        assert np.all(np.asarray(batch) == index)


# Threads


def test_a_second_epoch_waits_for_an_abandoned_one(mesh):
    class Sequence(keras.utils.PyDataset):
        calls: list[object] = []  # noqa: RUF012

        def __len__(self):
            return 5

        def __getitem__(self, index):
            time.sleep(0.02)
            self.calls.append(index)
            return (X,)

        def on_epoch_begin(self):
            self.calls.append("begin")

        def on_epoch_end(self):
            self.calls.append("end")

    dataset = DistributedDataset(Sequence(), mesh, prefetch=1)
    for _ in range(3):
        for _ in dataset:
            break
    list(dataset)
    epochs = " ".join(map(str, Sequence.calls)).split("end")
    assert all(epoch.split()[0] == "begin" for epoch in epochs[:-1])
    assert epochs[-2].split() == ["begin", "0", "1", "2", "3", "4"]


def test_two_epochs_at_the_same_time(mesh):
    dataset = DistributedDataset(X, mesh, batch_size=4)
    pairs = list(zip(dataset, dataset, strict=True))
    assert len(pairs) == 5
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_grain_threads_end_with_the_epoch(mesh):
    dataset = DistributedDataset(grain.MapDataset.range(64).repeat().batch(8), mesh)
    for step, _ in enumerate(dataset):
        if step == 3:
            break


# From a function


def test_function_is_called_each_epoch_with_the_context(mesh):
    contexts = []

    def make(context):
        contexts.append(context)
        b = context.get_per_replica_batch_size(8)
        return numpy_dataset((X[:16], Y[:16])).batch(b)

    context = InputContext(num_replicas_in_sync=4)
    dataset = DistributedDatasetFromFunction(make, mesh, context)
    for _ in range(2):
        steps = list(dataset)
        assert [y.array.shape for _, y in steps] == [(4, 2)] * 2
        ys = np.concatenate([np.asarray(y).ravel() for _, y in steps])
        np.testing.assert_array_equal(ys, Y[:16])
    assert contexts == [context, context]
    assert dataset.element_spec[0].shape == (2, 3)


@pytest.mark.parametrize(("num_examples", "num_left"), [(20, 4), (15, 7)])
def test_function_with_a_last_step_that_is_incomplete(
    num_examples, num_left, mesh, caplog
):
    x = X[:num_examples]
    num_steps = 2 if num_left == 4 else 1

    def make(_):
        return numpy_dataset(x).batch(2)

    def dataset(policy):
        return DistributedDatasetFromFunction(
            make, mesh, InputContext(), remainder=policy
        )

    assert len(list(dataset("drop"))) == num_steps
    assert f"{num_left} examples" in dropped(caplog)[0]
    with pytest.raises(ValueError, match="one step needs 4 batches"):
        list(dataset("error"))
    steps = list(dataset("pad"))
    assert len(steps) == num_steps + 1
    rows = [np.asarray(batch)[np.asarray(mask)] for batch, mask in steps]
    np.testing.assert_array_equal(np.concatenate(rows), x)


def test_function_with_too_little_data_for_one_step(mesh):
    dataset = DistributedDatasetFromFunction(
        lambda _: [X, X], mesh, InputContext(), remainder="drop"
    )
    with pytest.raises(ValueError, match="only 2 batches, or"):
        list(dataset)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "NoneType None"), (lambda: 3, "int 3")]
)
def test_a_function_that_returns_no_dataset(value, text, mesh):
    dataset = DistributedDatasetFromFunction(lambda _: value, mesh, InputContext())
    with pytest.raises(TypeError, match=f"got {text}, expected .*batches"):
        list(dataset)


def test_a_function_whose_dataset_reuses_its_buffer(mesh):
    def batches(_):
        buffer = np.empty((2, 1), "float32")
        for i in range(8):
            buffer[:] = i
            yield buffer

    steps = list(DistributedDatasetFromFunction(batches, mesh, InputContext()))
    expected = np.repeat(np.arange(8), 2).reshape(2, 4, 2, 1)
    np.testing.assert_array_equal([np.asarray(step) for step in steps], expected)
