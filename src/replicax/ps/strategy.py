"""`ParameterServerStrategy`: variables on servers, workers that come and go."""

import sys
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.typing import ArrayLike

from replicax._private import keras as internals
from replicax._util import json_codec, random_state
from replicax._util.dry_run import current_rehearsal
from replicax._util.types import PyTree
from replicax.cluster.config import TaskConfig, check_cluster
from replicax.cluster.resolvers import ClusterResolver, default_resolver
from replicax.cluster.timeouts import Timeouts, checked_timeouts, takes_timeouts
from replicax.engine.collectives import CrossDeviceOps
from replicax.engine.devices import default_devices
from replicax.engine.program import Kept, Program, StepResult
from replicax.engine.variables import Update, is_seed_state
from replicax.errors import ClusterConfigError, ClusterError
from replicax.keras.session import FitSession
from replicax.ps.credentials import Credentials
from replicax.ps.fit import WorkQueueFit
from replicax.ps.partition import Partitioner
from replicax.ps.remote import ServerPushes, WorkerShare
from replicax.ps.rows import RemoteTables
from replicax.ps.serve import serve
from replicax.ps.session import Session
from replicax.ps.variables import RemoteStep, RemoteVariables
from replicax.ps.worker_input import ElasticInputShard
from replicax.strategies.home import ReplicaHome
from replicax.strategies.runner import not_rehearsable
from replicax.strategies.strategy import Strategy

__all__ = ["ParameterServerStrategy"]


@takes_timeouts()
class ParameterServerStrategy(Strategy):
    """Training with the variables on parameter servers; workers need not keep pace.

    The script is the same in all tasks, and `TF_CONFIG` gives each its role:

    - In a `ps` task the constructor serves until the job is done and then **ends the
      process**, with exit code 0.
    - In a `worker` or `chief` task each step computes gradients on all local replicas,
      sends them to the servers, and gets the newest values back. The servers make the
      updates with the script's Keras optimizer. A worker that ends takes no other with
      it. The chief, which is `worker` 0 where there is no `chief` task, trains too.
    - An `evaluator` works by itself.

    Workers train asynchronously: a step's gradients may be of values that others have
    changed since. `max_staleness` bounds that, and `sync=True` removes it.
    (TF: `tf.distribute.experimental.ParameterServerStrategy`.)

    Args:
        cluster_resolver: Describes the cluster. Defaults to `TF_CONFIG`.
        variable_partitioner: How variables are cut along their first dimension, such as
            `rx.experimental.partitioners.MinSizePartitioner()`; None: not at all.
        sync: Whether all workers make a step together, as under `MirroredStrategy`:
            each computes on its rows of the global batch.
        backup_workers: With `sync`, how many workers a step does without: parts of the
            batch that slow ones have not brought are computed by others as well.
        max_staleness: Most updates that may be made by others between the moment when a
            worker fetches the values for a step of `fit` and that step's own update.
            None: any number.
        compression: `"bfloat16"` halves what gradients take on the way; None: as is.
        snapshot_dir: Folder, on each server's machine, for snapshots from which a
            restarted server goes on. None: a lost server ends the job.
        snapshot_every_updates: Write one after that many updates. With 1 what a worker
            has been told is on disk, so that a killed server loses nothing; each update
            then waits for the disk.
        snapshot_every_seconds: Write one after that many seconds.
        cross_device_ops: How gradients of a worker's own replicas are summed.
        timeouts: How long to wait: `startup` for all servers and the chief's values,
            `step` for other workers where all meet, such as the end of an epoch,
            `heartbeat` for a sign of life of each worker, `server` for a lost server
            and `chief` for a lost chief to be restarted. Defaults to `rx.Timeouts()`.

    Raises:
        ClusterConfigError: If the cluster's description is malformed or has no servers.
        ConnectionLost: If a server is not there by the start-up deadline.
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
        sync: bool = False,
        backup_workers: int = 0,
        max_staleness: int | None = None,
        compression: str | None = None,
        snapshot_dir: str | None = None,
        snapshot_every_updates: int | None = 1000,
        snapshot_every_seconds: float | None = 60.0,
        cross_device_ops: CrossDeviceOps | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        if current_rehearsal() is not None:
            raise not_rehearsable("ParameterServerStrategy")
        config = _cluster(cluster_resolver)
        timeouts = checked_timeouts(timeouts, "ParameterServerStrategy")
        workers = [task.name for task in config.cluster.workers]
        _check_options(sync, backup_workers, max_staleness, compression, len(workers))
        if config.task_type == "ps":
            serve(
                config,
                Credentials.from_environment(),
                timeouts,
                snapshot_dir=snapshot_dir,
                snapshot_every_updates=snapshot_every_updates,
                snapshot_every_seconds=snapshot_every_seconds,
            )
        self.cluster_resolver = cluster_resolver or default_resolver()
        self.sync = sync
        self.backup_workers = backup_workers
        self.compression = compression
        self.max_staleness = max_staleness
        self.session: Session | None = None
        self.keeps_values = False  # As inside of `fit`, which fetches them in time.
        self.coordinator: Any = None
        self._num_parts = len(workers) - backup_workers if sync else 1
        devices = default_devices()
        index = config.process_id
        super().__init__(
            devices,
            cross_device_ops,
            defers_updates=index is not None,
            first_replica=(index or 0) * len(devices),
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
        self._rows = RemoteTables(self.session, compression=compression)
        self._remote = RemoteVariables(
            self.session,
            self.group.mirrored,
            partitioner=variable_partitioner,
            compression=compression,
            sync=sync,
            rows=self._rows,
        )
        self.input_shard = ElasticInputShard(
            index, len(workers), self._num_parts if sync else None
        )
        self._in_flight: tuple[RemoteStep, list[ServerPushes]] | None = None
        self._parts: deque[WorkerShare] = deque()
        self.steps_applied = 0
        self.home = _ServerHome(self, self.session)
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
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients make one update."""
        return self.group.num_replicas * self._num_parts

    @property
    def num_parts(self) -> int:
        """Parts of a synchronous step; 1 where workers train asynchronously."""
        return self._num_parts

    @property
    def is_chief(self) -> bool:
        """Whether this worker does what is done once for all, such as exporting."""
        return self.session is None or self.session.is_chief

    @property
    def overlaps(self) -> bool:
        """Whether a step begins before the last one's update has come back.

        A worker alone would only learn more slowly by it.
        """
        alone = self.session is None or len(self.session.workers) == 1
        return not (alone or self.sync or self.max_staleness is not None)

    @property
    def row_source(self) -> RemoteTables | None:
        """Where `rx.layers.Embedding` has its rows; None: in the layer."""
        return None if self.session is None else self._rows

    def _agree_on_random_state(self) -> None:
        """All workers draw the chief's initial weights, where nobody sets a seed."""
        assert self.session is not None
        mine = json_codec.encode(random_state.capture(), "the random state")
        key = "random state"
        if self.is_chief:
            self.session.board("put", key=key, value=mine)
        found = self.session.get(key, "the start")
        if found != mine:
            random_state.restore(json_codec.decode(found))

    @property
    def remote(self) -> RemoteVariables:
        """This worker's variables that lie on servers."""
        return self._remote

    def publish(self) -> None:
        """Send values and learning rates that were assigned on the chief."""
        if self.is_chief:
            self._remote.publish()

    def finalize(self, optimizer: keras.optimizers.Optimizer) -> None:
        """The end of training: an optimizer's moving averages become the values."""
        # Keras does this after an error too; a server that is lost is not asked again.
        is_lost = isinstance(sys.exc_info()[1], ClusterError)
        if self.session is not None and not is_lost:
            self.settle()
            self._remote.write_averages(optimizer)

    def staleness(self) -> dict[str, dict[int, int]]:
        """How stale the gradients were that the servers have applied until now.

        Returns:
            For each worker how many of its gradients had which staleness, which is the
            number of updates between the values they are of and their own update. Each
            server counts what came to it.
        """
        total: dict[str, Counter[int]] = {}
        connections = [] if self.session is None else self.session.connections
        for connection in connections:
            found = connection.call("store.status")["staleness"]
            for worker, histogram in found.items():
                counts = {int(k): count for k, count in histogram.items()}
                total.setdefault(worker, Counter()).update(counts)
        return {worker: dict(sorted(total[worker].items())) for worker in sorted(total)}

    def expect(self, part: WorkerShare) -> None:
        """Say which part of a synchronous step the next training program computes."""
        self._parts.append(part)

    def refresh(self) -> None:
        """Fetch what the servers have into the variables."""
        if self.session is not None:
            self.settle()
            self._remote.refresh()

    def refresh_values(self) -> None:
        """Fetch what the servers have for the next step; variables stay as they are."""
        self.settle()
        self._remote.pull()

    def execute(self, program: Program, arrays: Sequence[ArrayLike]) -> PyTree:
        """Run a program on the newest values, and push what it has computed."""
        values = internals.read_values(program.variables)
        stored = dict(zip(map(id, program.variables), values, strict=True))
        step = None
        if program.deferred_updates:
            share = self._next_part()
            step = self._remote.begin(*_trained_by(program), stored, share)
        before = {id(v): stored[id(v)] for v in program.written}
        tables = self._rows.tables_of(program.inputs)

        # Nothing is donated, and what the program writes is kept apart until the end:
        # so it may run again where a server with rows is lost, a part that others have
        # brought is as if never computed, and an error leaves all variables as they
        # were.
        def run() -> tuple[StepResult, list[jax.Array]]:
            kept = [Kept() for _ in program.written]
            inputs = [stored[id(v)] for v in program.inputs]
            return program(inputs, arrays, kept), internals.read_values(kept)

        result, written = self._rows.complete(run) if tables else run()
        stored |= zip(map(id, program.written), written, strict=True)
        if step is not None:
            deltas = [_difference(stored[id(v)], before[id(v)]) for v in step.state]
            counts = self._push(step, result.gradients, deltas, looks_up=bool(tables))
            if self.backup_workers and not counts:
                stored |= before
            step.write_back(stored)
        internals.write_values(
            program.changed, [stored[id(v)] for v in program.changed]
        )
        return result.results

    def _push(
        self,
        step: RemoteStep,
        gradients: Sequence[Sequence[jax.Array]],
        deltas: Sequence[jax.Array],
        *,
        looks_up: bool,
    ) -> bool:
        """Push what a step has computed; whether it counts, as far as is known.

        At most one push is in flight: the last step's, while this one is computed.
        """
        if not step.is_due:
            self.steps_applied += 1
            return False
        self.settle()
        rows = self._remote.push_rows(step)
        if self.sync:  # When a step is over, so are its rows.
            self._rows.finish(rows)
        self._in_flight = step, step.push(gradients, deltas)
        # The next step looks up rows that this one changes.
        counts = (self.overlaps and not looks_up) or self._finish()
        if not self.sync:
            self._rows.finish(rows)
        return counts

    def settle(self) -> None:
        """Wait until this worker's last step is applied."""
        self._finish()

    def _finish(self) -> bool:
        """Likewise; whether the step counts."""
        if self.session is None or self._in_flight is None:
            return True
        step, pushes = self._in_flight
        self._in_flight = None
        # Groups may have got a part from different workers; the first one decides.
        result = step.finish(pushes)[0]
        if result.counts:
            self.session.staleness[result.staleness] += 1
        self.session.steps += 1
        self.steps_applied += 1
        return result.counts

    def adopt(self, program: Program, stored: dict[int, jax.Array]) -> None:
        """Put the servers' values in `stored`, which holds a program's by id."""
        if program.deferred_updates:  # It is a training step.
            self._remote.connect(*_trained_by(program), stored)

    def _next_part(self) -> WorkerShare | None:
        if not self.sync:
            return None
        if self._parts:
            return self._parts.popleft()
        if self.backup_workers:
            raise NotImplementedError(
                "ParameterServerStrategy: backup_workers serve `fit` only; in a custom "
                "loop nobody knows which worker computes which rows. Leave "
                "backup_workers at 0."
            )
        assert self.session is not None
        return WorkerShare(
            step=None,
            part=self.session.index,
            num_parts=self._num_parts,
        )


class _ServerHome(ReplicaHome):
    """Variables live on servers, which make the updates; devices have copies.

    Args:
        strategy: The strategy.
        session: This worker's, with the servers.
    """

    keeps_slots = False

    def __init__(self, strategy: ParameterServerStrategy, session: Session) -> None:
        super().__init__(strategy.group)
        self._strategy = strategy
        self._session = session
        self._num_fits = 0

    def execute(self, program: Program, arrays: Sequence[ArrayLike]) -> PyTree:
        """Run a program on the newest values, and push what it has computed."""
        return self._strategy.execute(program, arrays)

    def settle(self) -> None:
        """Wait until this worker's last step is applied."""
        self._strategy.settle()

    def finalize(self, optimizer: keras.Optimizer) -> None:
        """Make an optimizer's moving averages the values."""
        self._strategy.finalize(optimizer)

    def prepared_gradients(
        self, optimizer: keras.Optimizer, grads: list[jax.Array | None]
    ) -> list[jax.Array | None]:
        """Clipped here where a push is the whole gradient of its step."""
        return self._strategy.remote.prepared(optimizer, grads)

    def claimed_steps(self, model: keras.Model, fit: object) -> WorkQueueFit:
        """How `fit` shares an epoch's steps with the other workers."""
        assert isinstance(fit, FitSession)
        self._num_fits += 1
        return WorkQueueFit(self._strategy, model, fit, self._num_fits)

    def expect_rows(self, num_rows: int) -> None:
        """Have a synchronous step on this worker's own batch count its examples."""
        strategy = self._strategy
        if strategy.sync and not strategy.backup_workers:
            strategy.expect(
                WorkerShare(
                    step=None,
                    part=self._session.index,
                    num_parts=strategy.num_parts,
                    weight=float(num_rows),
                )
            )

    def read_slots(self, optimizer: keras.Optimizer) -> dict[str, np.ndarray]:
        """The variables of an optimizer that servers have, by names for a checkpoint.

        They are those of an optimizer whose variables are in this process, so that
        either one's checkpoint serves the other.
        """
        self.settle()
        return {
            name if variable is None else f"{name}/{variable}": array
            for (name, variable), array in self._strategy.remote.slots(
                optimizer
            ).items()
        }

    def write_slots(
        self, optimizer: keras.Optimizer, arrays: dict[str, np.ndarray]
    ) -> None:
        """Set the variables of an optimizer on the servers; only the chief's count."""
        if not self._session.is_chief:
            return
        self.settle()
        split = {name: name.rpartition("/") for name in arrays}
        self._strategy.remote.restore_slots(
            optimizer,
            {
                (parts[0], int(parts[2])) if parts[2].isdigit() else (name, None): x
                for (name, parts), x in zip(split.items(), arrays.values(), strict=True)
            },
        )

    def begin(self) -> None:
        """Fetch the newest values."""
        if not self._strategy.keeps_values:
            self._strategy.refresh()


def _trained_by(program: Program) -> tuple[Sequence[Update], list[keras.Variable]]:
    """A program's updates, and its moving statistics, to which all workers add."""
    state = [
        v for v in program.written if v.aggregation == "mean" and not is_seed_state(v)
    ]
    return program.deferred_updates, state


@jax.jit
def _difference(new: jax.Array, old: jax.Array) -> jax.Array:
    return new - old


def _cluster(resolver: ClusterResolver | None) -> TaskConfig:
    found = resolver or default_resolver()
    source = "TF_CONFIG" if found is None else type(found).__name__
    if found is None or not found.cluster_spec():
        raise ClusterConfigError(
            "ParameterServerStrategy: no cluster is described. Set TF_CONFIG in each "
            "task, or start the script with `replicax run --workers 2 --ps 1`; on one "
            "machine without servers use rx.CentralStorageStrategy()."
        )
    config = check_cluster(
        found.cluster_spec(), found.task_type, found.task_id, source=source
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
    sync: bool,
    backup_workers: int,
    max_staleness: int | None,
    compression: str | None,
    num_workers: int,
) -> None:
    name = "ParameterServerStrategy"
    if not 0 <= backup_workers < num_workers:
        raise ValueError(
            f"{name}: backup_workers must be from 0 to {num_workers - 1} with "
            f"{num_workers} workers; got {backup_workers!r}."
        )
    if backup_workers and not sync:
        raise ValueError(
            f"{name}: backup_workers={backup_workers!r} needs sync=True; asynchronous "
            "workers wait for nobody."
        )
    if max_staleness is not None and (sync or max_staleness < 0):
        raise ValueError(
            f"{name}: max_staleness={max_staleness!r} must be None or at least 0, and "
            "None with sync=True, which has no staleness."
        )
    if compression not in (None, "bfloat16"):
        raise ValueError(
            f"{name}: compression must be None or 'bfloat16'; got {compression!r}."
        )
