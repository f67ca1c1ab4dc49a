"""`ParameterServerStrategy`: variables on servers, asynchronous workers."""

from collections import Counter
from typing import Any

from replicax._util import json_codec, random_state
from replicax._util.arguments import require_path
from replicax.cluster.config import TaskConfig, check_cluster
from replicax.cluster.resolvers import (
    ClusterResolver,
    default_resolver,
    require_resolver,
)
from replicax.cluster.timeouts import Timeouts, checked_timeouts
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.devices import default_devices
from replicax.errors import ClusterConfigError
from replicax.ps.credentials import Credentials
from replicax.ps.partition import Partitioner
from replicax.ps.serve import serve
from replicax.ps.server_home import ServerHome
from replicax.ps.session import Session
from replicax.ps.worker_input import ElasticInputShard
from replicax.strategies.dry_run import current_receiver, refuse_dry_run
from replicax.strategies.strategy import Strategy

__all__ = ["ParameterServerStrategy"]


class ParameterServerStrategy(Strategy):
    """Asynchronous training with the variables on parameter servers.

    The script is the same in all tasks; `TF_CONFIG` says which task runs it:

    - In a `ps` task the constructor serves until the job is done and then **ends the
      process**, with exit code 0.
    - In a `worker` or `chief` task each step computes gradients on all local replicas,
      pushes them to the servers, and receives the newest values. The servers apply the
      script's Keras optimizer. If a worker ends, the others continue. The chief also
      trains; without a `chief` task it is `worker` 0.
    - An `evaluator` uses one machine only.

    Workers train asynchronously: when a step's gradients are applied, other workers may
    have updated the values since the gradients were computed. `max_staleness` bounds
    the number of these updates. For synchronous training use
    `rx.MultiWorkerMirroredStrategy`, with `rx.CentralStorageStrategy` or
    `rx.FullyShardedStrategy` where memory is short.
    (TF: `tf.distribute.experimental.ParameterServerStrategy`.)

    Args:
        cluster_resolver: Describes the cluster. Defaults to `TF_CONFIG`.
        variable_partitioner: How variables are cut along their first dimension, such as
            `rx.experimental.partitioners.MinSizePartitioner()`. None: variables are not
            cut.
        max_staleness: Largest number of updates by other workers between the pull of
            the values for a step of `fit` and the update of that step. None: no limit.
        overlap: Whether a worker begins a step before it has the answer to its last
            push, to overlap communication and computation on slow networks. The step's
            gradients are then computed from values without the last update.
        compression: `"bfloat16"` halves the bytes of pushed gradients. None: gradients
            keep their dtype.
        snapshot_dir: Folder, on each server's machine, for snapshots that a restarted
            server restores. None: a lost server ends the job.
        snapshot_every_updates: Write a snapshot after the first update, then after this
            many more. With 1 each update waits until it is on disk, so that a killed
            server loses nothing.
        snapshot_every_seconds: Write a snapshot after this many seconds.
        cross_device_ops: How gradients of a worker's own replicas are summed.
        timeouts: How long to wait: `startup` for all servers and the chief's values,
            `step` for other workers at a barrier, such as the end of an epoch,
            `heartbeat` for a heartbeat of each worker, `server` and `chief` for a lost
            server or chief to be restarted. Defaults to `rx.Timeouts()`.

    Raises:
        ClusterConfigError: If the cluster's description is malformed or has no servers.
        ConnectionLost: If a server cannot be reached by the start-up deadline.
        SystemExit: In a `ps` task, at the end of the job.

    Example:
        >>> import replicax as rx
        >>> strategy = rx.ParameterServerStrategy()  # doctest: +SKIP
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        max_staleness: int | None = None,
        overlap: bool = False,
        compression: str | None = None,
        snapshot_dir: str | None = None,
        snapshot_every_updates: int | None = 1000,
        snapshot_every_seconds: float | None = 60.0,
        cross_device_ops: CrossDeviceOps | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        if current_receiver() is not None:
            refuse_dry_run("ParameterServerStrategy")
        config = _cluster(cluster_resolver)
        timeouts = checked_timeouts(timeouts, "ParameterServerStrategy")
        workers = [task.name for task in config.cluster.workers]
        _check_options(max_staleness, overlap, compression)
        if snapshot_dir is not None:
            require_path(snapshot_dir, "ParameterServerStrategy: snapshot_dir")
        if config.task_type == "ps":
            serve(
                config,
                Credentials.from_environment(),
                timeouts,
                snapshot_dir=snapshot_dir,
                snapshot_every_updates=snapshot_every_updates,
                snapshot_every_seconds=snapshot_every_seconds,
            )
        self._cluster_resolver = cluster_resolver or default_resolver()
        self.compression = compression
        self.max_staleness = max_staleness
        self.overlap = overlap
        self.session: Session | None = None
        self.coordinator: Any = None
        devices = default_devices()
        index = config.process_id
        super().__init__(
            devices,
            cross_device_ops,
            updates_at_home=index is not None,
            first_seed=(index or 0) * len(devices),
        )
        if index is None:
            return  # The evaluator.
        servers = [
            config.cluster.task_address("ps", i)
            for i in config.cluster.task_indices("ps")
        ]
        self.session = Session(
            workers, index, servers, Credentials.from_environment(), timeouts
        )
        self.input_shard = ElasticInputShard(index, len(workers))
        self.home = self.servers = ServerHome(self, self.session, variable_partitioner)
        self.session.join()
        self._agree_on_random_state()

    def __repr__(self) -> str:
        if self.session is None:
            return super().__repr__()
        return (
            f"ParameterServerStrategy({self.session.name} of "
            f"{len(self.session.workers)} workers, "
            f"{len(self.session.connections)} servers)"
        )

    @property
    def is_chief(self) -> bool:
        """Whether this worker does what only one worker may do, such as exports."""
        return self.session is None or self.session.is_chief

    def _agree_on_random_state(self) -> None:
        """Use the chief's random state, so that all workers draw the same weights."""
        assert self.session is not None
        own = json_codec.encode(random_state.capture(), "the random state")
        chief = self.session.decided("random state", "the start", lambda: own)
        if chief != own:
            random_state.restore(json_codec.decode(chief))

    def staleness(self) -> dict[str, dict[int, int]]:
        """The staleness of all gradients that the servers have applied so far.

        Returns:
            For each worker a histogram of its gradients by staleness. The staleness of
            a gradient is the number of updates between the values that it was computed
            from and its own update. A gradient counts once for each server.
        """
        total: dict[str, Counter[int]] = {}
        connections = [] if self.session is None else self.session.connections
        for connection in connections:
            by_worker = connection.call("store.status")["staleness"]
            for worker, histogram in by_worker.items():
                counts = {int(k): count for k, count in histogram.items()}
                total.setdefault(worker, Counter()).update(counts)
        return {worker: dict(sorted(total[worker].items())) for worker in sorted(total)}


def _cluster(resolver: ClusterResolver | None) -> TaskConfig:
    require_resolver(resolver, "ParameterServerStrategy")
    resolved = resolver or default_resolver()
    source = "TF_CONFIG" if resolved is None else type(resolved).__name__
    if resolved is None or not resolved.cluster_spec():
        raise ClusterConfigError(
            "ParameterServerStrategy: no cluster is described. Set TF_CONFIG in each "
            "task, or start the script with `replicax run --workers 2 --ps 1`; on one "
            "machine without servers use rx.CentralStorageStrategy()."
        )
    config = check_cluster(
        resolved.cluster_spec(), resolved.task_type, resolved.task_id, source=source
    )
    if "ps" not in config.cluster.jobs:
        raise ClusterConfigError(
            f"ParameterServerStrategy: {source} has no parameter servers, only the "
            f"jobs {config.cluster.jobs}. Add tasks of type 'ps', or use "
            "rx.MultiWorkerMirroredStrategy()."
        )
    if not config.cluster.workers:
        raise ClusterConfigError(
            f"ParameterServerStrategy: {source} has no workers, only the jobs "
            f"{config.cluster.jobs}. Add tasks of type 'worker'."
        )
    return config


def _check_options(
    max_staleness: int | None, overlap: bool, compression: str | None
) -> None:
    name = "ParameterServerStrategy"
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(
            f"{name}: max_staleness={max_staleness!r} must be None or at least 0."
        )
    if overlap and max_staleness is not None:
        raise ValueError(
            f"{name}: overlap=True begins a step on older values, which "
            f"max_staleness={max_staleness!r} forbids. Leave one of them out."
        )
    if compression not in (None, "bfloat16"):
        raise ValueError(
            f"{name}: compression must be None or 'bfloat16'; got {compression!r}."
        )
