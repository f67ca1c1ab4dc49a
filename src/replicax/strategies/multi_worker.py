"""`MultiWorkerMirroredStrategy`: one replica per device of several machines."""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util.hashes import digest
from replicax._util.listing import listed
from replicax._util.stand_ins import stand_in_devices
from replicax._util.types import JSON
from replicax._util.waiting import Announced
from replicax._version import versions
from replicax.cluster.config import check_cluster
from replicax.cluster.detection import RunningCluster, local_devices, resolve
from replicax.cluster.joining import join, join_running
from replicax.cluster.resolvers import (
    ClusterResolver,
    TFConfigClusterResolver,
    require_resolver,
)
from replicax.cluster.timeouts import Timeouts, checked_timeouts
from replicax.cluster.tpu_slice import TPUClusterResolver
from replicax.cluster.tpu_system import join_slice
from replicax.cluster.workers import Workers
from replicax.engine.aggregation import Rule
from replicax.engine.checks.consistency import (
    described_value,
    local_checksums,
    synchronize_random_state,
)
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.communication import CollectiveCommunication, CommunicationOptions
from replicax.engine.devices import Device, before_start, devices_of_one_kind
from replicax.engine.layouts import ModelSplit
from replicax.engine.program import Program
from replicax.engine.variables import Variable
from replicax.errors import ClusterConfigError, DeviceError
from replicax.strategies.strategy import Strategy

__all__ = ["ExperimentalMultiWorkerMirroredStrategy", "MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several machines.

    Every device of every worker holds a copy of each variable and computes on its rows
    of the global batch; gradients are summed over all devices. Start the same script on
    each machine, with a launcher such as `srun` or `torchrun`, or with the machine's
    `TF_CONFIG`. Create the strategy at the top of the script, before JAX starts its
    devices.
    (TF: `tf.distribute.MultiWorkerMirroredStrategy`.)

    If a worker dies, hangs, raises or runs another program, the processes of all
    workers end with a message that names this worker. The exit code is 138 if a restart
    of all may help.

    Args:
        cluster_resolver: Describes the cluster: a resolver; the name of a launcher,
            such as `"slurm"`; or `"alone"`, to train in this process only. Defaults to
            the launcher whose variables are set. The page "Launchers" lists them.
        communication_options: Options of the gradients' communication.
        cross_device_ops: The all-reduce of gradients. Defaults to `rx.NcclAllReduce()`.
        aggregation: Rules for state, as for `rx.MirroredStrategy`.
        replicas_per_device: Number of replicas on each device.
        shard_update: Whether to shard the optimizer's update (ZeRO stage 1).
        check_replicas_every: Number of steps between two comparisons of the replicas'
            variables. None: only when `check_replicas` is called.
        check_input: Whether to compare the workers' first batches of each epoch, if all
            workers should read the same data. Turn it off for augmentations that differ
            between workers.
        timeouts: Deadlines of start-up, steps, heartbeats and shutdown. Defaults to
            `rx.Timeouts()`.

    Raises:
        ClusterConfigError: If the cluster's description is malformed or incomplete, or
            if two launchers contradict each other; the message names the variables.
        ClusterError: If a worker is absent at the start-up deadline.
        DeviceError: For NCCL without GPUs; if workers differ in their devices.
        RuntimeError: If JAX has started its devices already.

    Example:
        >>> import replicax as rx
        >>> strategy = rx.MultiWorkerMirroredStrategy()  # Without a launcher: alone.
        >>> strategy.num_workers
        1
    """

    _devices_argument: Sequence[str | Device] | None = None
    _shards_weights = False

    def __init__(
        self,
        cluster_resolver: ClusterResolver | str | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        aggregation: Mapping[str, Rule] | None = None,
        replicas_per_device: int = 1,
        shard_update: bool = False,
        check_replicas_every: int | None = None,
        check_input: bool = True,
        timeouts: Timeouts | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(cluster_resolver, str):
            require_resolver(cluster_resolver, name)
        options = communication_options or CommunicationOptions()
        timeouts = checked_timeouts(timeouts, name)
        if options.timeout_seconds is not None:
            timeouts = dataclasses.replace(timeouts, step=options.timeout_seconds)
        stand_ins, gpus = stand_in_devices(), None
        if cluster_resolver is not None and not isinstance(cluster_resolver, str):
            self._resolver = cluster_resolver
        elif stand_ins is not None:
            self._resolver = TFConfigClusterResolver()
        else:
            self._resolver, place = resolve(cluster_resolver, timeouts, name)
            gpus = local_devices(place)
        self._cluster_resolver = self._resolver
        if stand_ins is None:
            before_start()
            workers = self._join_workers(timeouts, gpus)
            devices = self._find_devices(workers)
            num_local = len(devices) // workers.count
        else:  # The stand-ins are the devices of all workers.
            workers = Workers()
            devices = list(stand_ins)
            host = devices[0].process_index
            num_local = sum(d.process_index == host for d in devices)
        _check_devices(devices, workers, options, name)
        super().__init__(
            devices,
            cross_device_ops,
            communication_options=options,
            aggregation=aggregation,
            replicas_per_device=replicas_per_device,
            shard_update=shard_update,
            shard_weights=self._shards_weights,
            split=self._model_split(num_local),
            check_replicas_every=check_replicas_every,
            workers=workers,
            check_input=check_input,
        )
        # The variables whose values the workers have compared, by id.
        self._compared = weakref.WeakValueDictionary[int, Variable]()
        synchronize_random_state(workers)

    def _join_workers(self, timeouts: Timeouts, gpus: Sequence[int] | None) -> Workers:
        """Join the workers to train with."""
        resolver = self._resolver
        if isinstance(resolver, TPUClusterResolver):
            return join_slice(resolver, timeouts, type(self).__name__)
        if isinstance(resolver, RunningCluster):
            return join_running(timeouts)
        source = getattr(resolver, "environment", "") or type(resolver).__name__
        config = check_cluster(
            resolver.cluster_spec(),
            resolver.task_type,
            resolver.task_id,
            allow_ps=False,
            source=source,
        )
        cluster, index = config.cluster, config.process_id
        if config.task_type == "evaluator" or len(cluster.workers) <= 1:
            return Workers()  # An evaluator is not a worker of the cluster.
        if index is None:
            raise ClusterConfigError(
                f"{source}: this task is {config.name!r}, which is none of the "
                f"cluster's workers, {listed(t.name for t in cluster.workers)}."
            )
        return join(cluster, index, timeouts, source, gpus)

    def _find_devices(self, workers: Workers) -> list[Device]:
        """Find the replicas' devices, worker by worker."""
        name = type(self).__name__
        if workers.count == 1:
            return devices_of_one_kind(self._devices_argument, name)
        if self._devices_argument is not None:
            raise DeviceError(
                f"{name}: devices={list(self._devices_argument)!r} names devices of "
                f"one machine, but there are {workers.count} workers. Leave it out, "
                "and hide devices with CUDA_VISIBLE_DEVICES."
            )
        return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))

    def _model_split(self, num_local: int) -> ModelSplit | None:
        """The sharding of each replica's weights over devices of a worker, or None."""
        return None

    def __repr__(self) -> str:
        if self.num_workers == 1:
            return super().__repr__()
        per_worker = self.group.num_local
        return (
            f"{type(self).__name__}({self._workers.name} of {self.num_workers} workers,"
            f" {per_worker} {'replica' if per_worker == 1 else 'replicas'} each)"
        )

    @property
    def num_workers(self) -> int:
        """Number of processes that train together."""
        return self._workers.count

    @property
    def task_type(self) -> str | None:
        """This process' job, such as `"worker"`; None without a cluster."""
        return self._resolver.task_type

    @property
    def task_id(self) -> int | None:
        """This process' index within its job; None without a cluster."""
        return self._resolver.task_id

    def _agree_on(
        self, program: Program, values: Sequence[jax.Array], arrays: Sequence[ArrayLike]
    ) -> None:
        if self.num_workers == 1:
            return
        variables = [internals.described(v) for v in program.variables]
        facts: dict[str, JSON] = {
            "versions": versions(),
            "the function": program.name,
            "the variables": variables,
            **program.facts,
            "the arguments' shapes": [
                f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}"
                for x in arrays
            ],
        }
        with Announced(f"tracing {program.name}"):
            text = program.lower(values, arrays).as_text()
        facts["the compiled program (its digest)"] = digest(text)
        mirrored = program.mirrored_arguments.items()
        facts["the value of an argument that all replicas get"] = {
            name: described_value(arrays[number]) for number, name in mirrored
        }
        new = [
            i
            for i, v in enumerate(program.variables)
            # Shards differ between workers.
            if self._compared.get(id(v)) is not v
            and self.home.layout(v).is_fully_replicated
        ]
        if new:
            checksums = local_checksums([values[i] for i in new])
            facts["the variables' values (their checksums)"] = [
                f"{program.variables[i].path} {checksum:08x}"
                for i, checksum in zip(new, checksums, strict=True)
            ]
        self._compared.update((id(v), v) for v in program.variables)
        number = self._workers.agree(facts, f"the program of {program.name}")
        program.operation = dataclasses.replace(
            program.operation, mark=f"program {number};".encode()
        )


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy):
    """`rx.MultiWorkerMirroredStrategy` with the arguments of TF's experimental class.

    (TF: `tf.distribute.experimental.MultiWorkerMirroredStrategy`.)

    Args:
        communication: The implementation of collectives.
        cluster_resolver: As for `rx.MultiWorkerMirroredStrategy`.
        **options: The other keywords of `rx.MultiWorkerMirroredStrategy`.

    Example:
        >>> import replicax as rx
        >>> strategy = rx.experimental.MultiWorkerMirroredStrategy(
        ...     communication=rx.experimental.CollectiveCommunication.RING
        ... )
        >>> strategy.num_workers  # Without a launcher: alone.
        1
    """

    def __init__(
        self,
        communication: CollectiveCommunication = CollectiveCommunication.AUTO,
        cluster_resolver: ClusterResolver | str | None = None,
        **options: Any,
    ) -> None:
        options.setdefault(
            "communication_options", CommunicationOptions(implementation=communication)
        )
        super().__init__(cluster_resolver, **options)


def _check_devices(
    devices: Sequence[Device],
    workers: Workers,
    options: CommunicationOptions,
    caller: str,
) -> None:
    platforms = sorted({d.platform for d in devices})
    if options.implementation is CollectiveCommunication.NCCL and not all(
        d.platform == "gpu" for d in devices
    ):
        raise DeviceError(
            f"{caller}: CollectiveCommunication.NCCL needs GPUs, but the devices are "
            f"{', '.join(platforms)}. Use AUTO (Gloo on CPUs, ICI on TPUs)."
        )
    counts = [sum(d.process_index == i for d in devices) for i in range(workers.count)]
    if len(set(counts)) > 1 or len(platforms) > 1:
        numbers = listed(map("{}: {}".format, workers.names, counts))
        raise DeviceError(
            f"{caller}: all workers need the same number of devices "
            f"of one kind; got {numbers} ({', '.join(platforms)}). Hide devices with "
            "CUDA_VISIBLE_DEVICES, or use the same kind of machine."
        )
