"""The rows that each worker reads, for every policy."""

import collections
import contextlib

import grain
import keras
import numpy as np
import pytest
from tests.input.package_log import PackageLog

import replicax as rx
import replicax.testing
from replicax.input.sharding import AutoShardPolicy, FileDataset, worker_dataset

X = np.arange(48, dtype="float32")


def files(number):
    return FileDataset([f"{i}.npy" for i in range(number)], list)


@pytest.mark.parametrize(
    ("policy", "count", "is_own"),
    [("off", 2, True), ("off", 1, False), ("auto", 2, False), ("data", 2, False)],
)
def test_which_workers_have_data_of_their_own(policy, count, is_own):
    dataset = [X]
    shard = worker_dataset(dataset, AutoShardPolicy(policy), count - 1, count)
    assert shard == (dataset, is_own)


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.FILE])
@pytest.mark.parametrize(("number", "count"), [(2, 2), (7, 3), (8, 4)])
def test_one_worker_reads_each_file(policy, number, count):
    read = []
    for index in range(count):
        dataset, is_own = worker_dataset(files(number), policy, index, count)
        assert is_own
        read += dataset()
    assert sorted(read) == files(number).files


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.FILE])
def test_fewer_files_than_workers(policy, caplog):
    dataset = files(2)
    assert worker_dataset(dataset, policy, 2, 3) == (dataset, False)
    assert "2 files cannot be divided between 3 workers" in caplog.text
    assert "AutoShardPolicy.DATA" in caplog.text


def test_files_that_are_not_divided(caplog):
    dataset = files(2)
    assert worker_dataset(dataset, AutoShardPolicy.DATA, 0, 2) == (dataset, False)
    assert worker_dataset(dataset, AutoShardPolicy.FILE, 0, 1) == (dataset, False)
    assert dataset() == dataset.files
    assert not caplog.records


def test_the_file_policy_needs_files():
    with pytest.raises(ValueError, match=r"needs a rx\.FileDataset, .* got a list"):
        worker_dataset([X], AutoShardPolicy.FILE, 0, 2)


# Two processes of two devices each.

NUM_PER_FILE = 12


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return (X[8 * index : 8 * index + 8],)


def generator():
    for index in range(6):
        yield Batches()[index]


def grain_dataset():
    return grain.MapDataset.source(X).batch(8).map(lambda x: (x,))


def read_files(names):
    """Batches of 4 of the files' numbers: file `i` has twelve from `12 * i`."""
    for name in names:
        start = NUM_PER_FILE * int(name[0])
        for row in range(start, start + NUM_PER_FILE, 4):
            yield X[row : row + 4]


def steps_of(strategy, dataset):
    """Return the rows of this worker's replicas in each step."""
    return [
        [
            np.asarray(value).tolist()
            for value in strategy.experimental_local_results(
                batch[0] if isinstance(batch, tuple) else batch
            )
        ]
        for batch in dataset
    ]


class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise InterruptedError


def fitted(strategy, *data, callbacks=(), **options):
    """Train for an epoch and evaluate; return the weights and the loss."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    model.layers[0].kernel.assign([[0.5]])
    with contextlib.suppress(InterruptedError):
        model.fit(*data, shuffle=False, verbose=0, callbacks=[*callbacks], **options)
    loss = model.evaluate(*data, verbose=0, **options)
    return [weight.tolist() for weight in model.get_weights()], loss


def shards(folder):
    strategy = rx.MultiWorkerMirroredStrategy()
    log, index = PackageLog(), strategy.workers.index
    contexts = []

    def from_context(context):
        contexts.append(context)
        own = X[context.input_pipeline_id :: context.num_input_pipelines]
        size = context.get_per_replica_batch_size(8)
        return [own[i : i + size] for i in range(0, len(own), size)]

    def distributed(dataset, policy=AutoShardPolicy.AUTO, **options):
        return steps_of(
            strategy,
            strategy.experimental_distribute_dataset(
                dataset, auto_shard_policy=policy, **options
            ),
        )

    decoded = []

    def decode(x):
        decoded.append(x)
        return x

    source = grain.MapDataset.source(X).map(decode)
    same = {
        "Grain, of single rows": distributed(source.batch(8)),
        "arrays": distributed(X, batch_size=8),
        "generator": distributed(generator),
        "PyDataset": distributed(Batches()),
        "Grain": distributed(grain_dataset()),
        "DATA": distributed(generator, AutoShardPolicy.DATA),
        "prefetch": distributed(generator, prefetch=0),
    }
    four = FileDataset([f"{i}.npy" for i in range(4)], read_files)
    own = {
        "AUTO files": distributed(four),
        "FILE": distributed(four, AutoShardPolicy.FILE),
        "from function": steps_of(
            strategy, strategy.distribute_datasets_from_function(from_context)
        ),
    }
    logged = log.pop()
    num_decoded = len(decoded)
    decoded.clear()
    pairs = source.map(lambda x: (x[None], x[None])).batch(8)
    weights = [
        fitted(strategy, X[:, None], X[:, None], batch_size=8),
        fitted(strategy, pairs),
    ]
    num_reads = collections.Counter(map(float, decoded))
    backup = rx.BackupAndRestore(folder, save_freq=1)
    fitted(strategy, pairs, callbacks=[backup, Interrupt()])
    weights.append(fitted(strategy, pairs, callbacks=[backup]))
    off = distributed([X[:8] + 100 * index], AutoShardPolicy.OFF)
    padded = strategy.experimental_distribute_dataset(
        X[:14], batch_size=8, remainder="pad"
    )
    return {
        "same": same,
        "own": own,
        "off": off,
        "ragged": [
            distributed(X[:14], batch_size=8),
            distributed(source[:14].batch(8)),
        ],
        "weights": weights,
        "num_decoded": num_decoded,
        "num_reads": [num_reads[x] for x in X],
        "masks": [steps_of(strategy, [mask]) for _, mask in padded],
        "contexts": contexts,
        "logged": logged,
    }


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    results = replicax.testing.run(
        shards,
        args=(str(tmp_path_factory.mktemp("backup")),),
        num_workers=2,
        logical_devices=2,
        deadline_seconds=90,
    )
    return list(results.returned.values())


@pytest.mark.multiprocess
def test_kinds_of_datasets_of_one_worker(workers):
    """Replicas get consecutive rows of the global batch."""
    for index, result in enumerate(workers):
        # [steps, workers, a worker's replicas, a replica's rows]
        expected = X.reshape(6, 2, 2, 2)[:, index].tolist()
        for kind, steps in result["same"].items():
            assert steps == expected, kind


@pytest.mark.multiprocess
def test_a_worker_decodes_only_its_rows_after_the_first_batch(workers):
    for index, result in enumerate(workers):
        assert result["num_decoded"] == 8 + 5 * 4
        # Keras reads some batches before `fit` and `evaluate`, to infer their shapes.
        others = np.reshape(result["num_reads"], (6, 2, 4))[1:, 1 - index]
        assert others.max() <= 2
        of_arrays, of_grain = result["ragged"]
        assert of_grain == of_arrays
        of_arrays, of_grain, resumed = result["weights"]
        assert of_arrays == of_grain == resumed


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["AUTO files", "FILE"])
def test_each_worker_reads_files_of_its_own(workers, way):
    read = [np.array(result["own"][way]) for result in workers]
    assert [x.shape for x in read] == [(12, 2, 1)] * 2  # Batches of 4, of all replicas.
    for index, x in enumerate(read):
        of_files = {int(value) // NUM_PER_FILE for value in x.ravel()}
        assert of_files == {index, index + 2}
    assert sorted(np.concatenate(read).ravel()) == X.tolist()
    for result in workers:
        assert result["logged"] == []


@pytest.mark.multiprocess
def test_a_worker_divides_its_own_global_batch_into_steps(workers):
    for index, result in enumerate(workers):
        expected = (X[:8] + 100 * index).reshape(2, 2, 2)
        assert result["off"] == expected.tolist()


@pytest.mark.multiprocess
def test_a_function_gets_the_context_of_its_worker(workers):
    for index, result in enumerate(workers):
        assert result["contexts"] == [
            rx.InputContext(
                num_input_pipelines=2, input_pipeline_id=index, num_replicas_in_sync=4
            )
        ]
        own = X[index::2].reshape(6, 2, 2)
        assert result["own"]["from function"] == own.tolist()


@pytest.mark.multiprocess
def test_masks_of_padded_batches(workers):
    masks = np.concatenate([np.array(r["masks"]).reshape(2, 4) for r in workers], 1)
    np.testing.assert_array_equal(masks.sum(axis=1), [8, 6])
    np.testing.assert_array_equal(masks[1], np.arange(8) < 6)
