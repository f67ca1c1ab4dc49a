"""Wrong arguments of public calls: the error names the argument and its value."""

from collections.abc import Callable
from typing import Any

import grain
import keras
import numpy as np
import pytest

import replicax as rx

X = np.ones((8, 3), "float32")


def mirrored(**options: Any) -> Callable[[], object]:
    return lambda: rx.MirroredStrategy(["cpu:0"], **options)


def distribute(**options: Any) -> Callable[[], object]:
    strategy = rx.get_strategy()
    return lambda: strategy.experimental_distribute_dataset(X, **options)


def run(*args: Any) -> Callable[[], object]:
    return lambda: rx.get_strategy().run(*args)


def run_on_dataset(of: Callable[[Any], object]) -> Callable[[], object]:
    dataset = distribute(batch_size=4)
    return lambda: rx.get_strategy().run(len, args=(of(dataset()),))


def in_replica(use: Callable[[Any], object]) -> Callable[[], object]:
    return run(lambda: use(rx.get_replica_context()))


WRONG: list[tuple[Callable[[], object], str]] = [
    (mirrored(check_replicas_every="a"), "check_replicas_every .*'a'"),
    (mirrored(check_replicas_every=1.5), "check_replicas_every .*1.5"),
    (mirrored(check_replicas_every=True), "check_replicas_every .*True"),
    (mirrored(check_replicas_every=0), "check_replicas_every .*0"),
    (mirrored(communication_options="ring"), "communication_options .*'ring'"),
    (mirrored(communication_options={}), "communication_options .*{}"),
    (mirrored(shard_update="no"), "shard_update .*'no'"),
    (lambda: rx.MirroredStrategy(2), "devices .*got 2"),  # type: ignore[arg-type]
    (lambda: rx.MultiWorkerMirroredStrategy(3), "cluster_resolver .*3"),  # type: ignore[arg-type]
    (lambda: rx.ParameterServerStrategy(3), "cluster_resolver .*3"),  # type: ignore[arg-type]
    (distribute(batch_size="8"), "batch_size .*'8'"),
    (distribute(batch_size=8.0), "batch_size .*8.0"),
    (distribute(batch_size=True), "batch_size .*True"),
    (distribute(batch_size=4, prefetch="2"), "prefetch .*'2'"),
    (mirrored(cross_device_ops="nccl"), "cross_device_ops .*'nccl'"),
    (mirrored(cross_device_ops=rx.NcclAllReduce), "cross_device_ops .*AllReduce'>"),
    (mirrored(replicas_per_device=0), "replicas_per_device .*0"),
    (
        lambda: rx.ModelParallelStrategy(model_parallel=0),
        "model_parallel .*0",
    ),
    (run(abs, (np.array(["a"]),)), "an array of <U1.*expected numbers"),
    (run_on_dataset(iter), "got a DistributedIterator .*one batch at a time"),
    (run_on_dataset(lambda x: x), "got a DistributedDataset .*one batch at a time"),
    (
        run(len, (grain.MapDataset.source([1, 2]),)),
        "got a SourceMapDataset .*one ",
    ),
    (in_replica(lambda context: context.merge_call(abs, X)), "args must be a tuple"),
    (lambda: rx.get_strategy().check_replicas([3]), "variables .*got 3"),  # type: ignore[list-item]
    (lambda: rx.get_strategy().check_replicas(3), "variables .*got 3"),  # type: ignore[arg-type]
    (lambda: rx.clip_by_global_norm([X], -1.0), "clip_norm .*-1.0"),
    (lambda: rx.value_and_grad(abs, [X]), "must be Keras variables"),  # type: ignore[list-item]
    (lambda: rx.FileDataset("a.npz", list), r"files .*Write \['a.npz'\]"),
    (lambda: rx.BackupAndRestore(None), "backup_dir .*None"),  # type: ignore[arg-type]
    (lambda: rx.BackupAndRestore("b", save_freq=0), "save_freq .*0"),
    (lambda: rx.BackupAndRestore("b", delete_checkpoint="no"), "delete_check.*'no'"),  # type: ignore[arg-type]
    (lambda: rx.CheckpointManager(3, "m"), "checkpoint must .*3"),  # type: ignore[arg-type]
    (lambda: rx.CheckpointManager(rx.Checkpoint(), None), "directory .*None"),  # type: ignore[arg-type]
    (lambda: rx.CheckpointManager(rx.Checkpoint(), "m", "2"), "max_to_keep .*'2'"),  # type: ignore[arg-type]
    (lambda: rx.SidecarEvaluator(3, X, "m"), "model .*3"),  # type: ignore[arg-type]
    (lambda: rx.schedules.LinearScalingWarmup("a", 2), "learning_rate='a'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("call", "pattern"), WRONG, ids=[f"{i}" for i in range(len(WRONG))]
)
def test_errors_name_the_argument_and_its_value(
    call: Callable[[], object], pattern: str
) -> None:
    with pytest.raises((TypeError, ValueError, rx.DeviceError), match=pattern):
        call()


def test_a_single_variable_is_checked() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = keras.Variable(1.0, name="alone")
    strategy.check_replicas(variable)  # type: ignore[arg-type]


def test_local_results_of_a_pytree() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    index = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    results = strategy.experimental_local_results({"index": index, "kept": "same"})
    assert [(int(x["index"]), x["kept"]) for x in results] == [(0, "same"), (1, "same")]
    assert strategy.experimental_local_results([1, 2]) == ([1, 2],)
