"""Connects this process to the other workers, and ends it together with them."""

import atexit
import contextlib
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from replicax._private.jax import distributed_state, has_devices
from replicax._util.listing import listed
from replicax._util.waiting import wait_for
from replicax.cluster import coordination_service, excepthook, workers
from replicax.cluster.addresses import parse_address
from replicax.cluster.failure import FailureReport
from replicax.cluster.listening import host_to_bind, set_gloo_address
from replicax.cluster.rendezvous import await_workers
from replicax.cluster.spec import ClusterSpec, Task
from replicax.cluster.store import Store
from replicax.cluster.timeouts import Timeouts
from replicax.cluster.watch import Watch
from replicax.cluster.workers import Workers
from replicax.errors import ClusterConfigError, ClusterError

__all__ = ["join", "join_running", "running_cluster"]

_JAX_TIMEOUT = 24 * 3600  # `Watch` finds a lost worker earlier and names it.
_joined: tuple[tuple[ClusterSpec, int], Workers] | None = None
_service: "subprocess.Popen[bytes] | None" = None
"""The process of the coordination service, which ends after this process."""


def join(
    cluster: ClusterSpec,
    index: int,
    timeouts: Timeouts,
    source: str,
    local_devices: Sequence[int] | None = None,
) -> Workers:
    """Connect to the cluster's other workers. A process joins one cluster at most.

    `index` is this process' position in `cluster.workers`, `source` names the cluster's
    description in messages, and `local_devices` are the indices of the GPUs that this
    process uses; None: all.

    Raises:
        ClusterError: If a worker is missing at the start-up deadline.
        ClusterConfigError: If the first worker's port is taken, if the workers have
            different clusters, or if this process is in another cluster already.
        RuntimeError: If JAX has already started its devices.
    """
    global _joined
    key = (cluster, index)
    if _joined is not None:
        if _joined[0] != key:
            raise ClusterConfigError(
                f"this process has joined the cluster {_joined[0][0]!r} and cannot "
                f"join {cluster!r} as well. Start another process for it."
            )
        return _joined[1]
    tasks = cluster.workers
    if not jax.distributed.is_initialized():
        _connect(cluster, index, timeouts, source, local_devices)
    elif (jax.process_count(), jax.process_index()) != (len(tasks), index):
        raise ClusterConfigError(
            f"jax.distributed.initialize was called for process {jax.process_index()} "
            f"of {jax.process_count()}, but {source} says process {index} of "
            f"{len(tasks)} ({listed(task.name for task in tasks)}). Remove the "
            "call, or make both agree."
        )
    members = Workers(
        [task.name for task in tasks],
        [task.address for task in tasks],
        index,
        store=Store(distributed_state().client),
        timeouts=timeouts,
    )
    workers.set_current(members)
    _joined = (key, members)
    if members.watch is not None:
        members.watch.start()
        excepthook.report_exceptions(members, members.watch)
        atexit.register(_leave, members, members.watch)
    return members


def join_running(timeouts: Timeouts) -> Workers:
    """Join the job of `jax.distributed`, after connecting it if necessary."""
    if not jax.distributed.is_initialized():
        _check_devices_not_started()
        jax.distributed.initialize(
            initialization_timeout=int(timeouts.startup),
            heartbeat_timeout_seconds=_JAX_TIMEOUT,
        )
    if distributed_state().num_processes == 1:
        return Workers()
    return join(running_cluster(), distributed_state().process_id, timeouts, "JAX")


def running_cluster() -> ClusterSpec:
    """The cluster that this process is connected to.

    Addresses are empty unless `join` connected the process: JAX does not expose them.
    """
    if _joined is not None:
        return _joined[0][0]
    return ClusterSpec({"worker": [""] * distributed_state().num_processes})


def _connect(
    cluster: ClusterSpec,
    index: int,
    timeouts: Timeouts,
    source: str,
    local_devices: Sequence[int] | None,
) -> None:
    global _service
    _check_devices_not_started()
    # JAX's preemption service would swallow SIGTERM from now on.
    jax.config.update("jax_enable_preemption_service", False)
    tasks = cluster.workers
    addresses = [task.address for task in tasks]
    try:
        await_workers(source, cluster, index, timeouts.startup)
        if index == 0:
            own, *others = map(parse_address, addresses)
            _service = coordination_service.start(
                own.port,
                len(tasks),
                linger_seconds=timeouts.heartbeat + 10,
                host=host_to_bind(own, others),
            )
        _initialize(tasks, index, timeouts, local_devices)
    except ClusterError:
        excepthook.retry_if_not_caught(tasks[index].name)
        raise
    # Only now: DNS knows a worker's name once the worker has started.
    set_gloo_address(addresses[:index] + addresses[index + 1 :])


def _initialize(
    tasks: Sequence[Task],
    index: int,
    timeouts: Timeouts,
    local_devices: Sequence[int] | None,
) -> None:
    try:
        jax.distributed.initialize(
            tasks[0].address,
            len(tasks),
            index,
            local_device_ids=local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(timeouts.startup),
            heartbeat_timeout_seconds=_JAX_TIMEOUT,
            shutdown_timeout_seconds=10,
            # JAX starts another service in process 0; nothing connects to it.
            coordinator_bind_address=None if index else "localhost:0",
        )
    except jax.errors.JaxRuntimeError as error:
        raise ClusterError(
            f"{tasks[index].name}: all workers met, but JAX's coordination service at "
            f"{tasks[0].address} did not connect them within {timeouts.startup:.0f} s: "
            f"{error}. Look for a worker that ended at its start."
        ) from error


def _check_devices_not_started() -> None:
    if has_devices():
        raise RuntimeError(
            "JAX has already started this process' devices alone. Create the strategy "
            "at the top of the script, before any array, model, dataset on a device or "
            "other strategy."
        )


def _leave(members: Workers, watch: Watch) -> None:
    """Wait until the others' scripts have ended: their steps may need this worker."""
    watch.leave()

    def running() -> list[str]:
        return [sign.full_name for sign in watch.signs if not sign.has_left]

    def have_all_ended() -> bool | None:
        if not running() and watch.has_equal_logs:
            return True
        return False if watch.is_missed else None

    def late() -> NoReturn:
        late_workers = running()
        watch.fail(
            FailureReport(
                task=members.name,
                culprit=late_workers[0].split(" ")[0],
                kind="lost",
                message=f"{listed(late_workers)} did not come to the end of the script"
                f" within {members.timeouts.shutdown:.0f} s "
                "(rx.Timeouts(shutdown=...)).",
                steps=watch.steps,
            )
        )

    all_ended = wait_for(
        have_all_ended,
        members.timeouts.shutdown,
        late=late,
        reminder=lambda _: f"{members.name} is done and waits for {listed(running())}",
    )
    if not all_ended:
        print(
            f"replicax: {members.name} ended its script, but "
            f"{listed(running(), nobody='another worker')} "
            "still needed it for a step. All workers must run the same steps.",
            file=sys.stderr,
        )
    watch.close()
    if all_ended:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()
    else:
        Store.abandon()
