"""Start-up and shutdown of a cluster: meeting the other workers, and leaving them."""

import atexit
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import jax

from replicax._private.jax import cluster_kinds
from replicax._util.listing import listed
from replicax._util.waiting import wait_for
from replicax.cluster import coordination_service, dispatch_log, excepthook, workers
from replicax.cluster.addresses import parse_address
from replicax.cluster.failure import ExitCode, FailureReport
from replicax.cluster.listening import host_to_bind, listen_for, listener
from replicax.cluster.spec import ClusterSpec
from replicax.cluster.store import Store
from replicax.cluster.timeouts import Timeouts
from replicax.cluster.watch import Watch
from replicax.cluster.workers import Workers
from replicax.errors import ClusterConfigError, ClusterError

__all__ = ["join"]

_MOST_PROBES = 64
_JAX_TIMEOUT = 24 * 3600  # Ours are shorter and say who is missing.
_logger = logging.getLogger("replicax")
_joined: tuple[Any, Workers] | None = None


def join(
    cluster: ClusterSpec, index: int, timeouts: Timeouts, description: str
) -> Workers:
    """Meet the other workers of a cluster; once in a process.

    Args:
        cluster: Whose chief and workers train together.
        index: This process' place among them.
        timeouts: How long to wait for what.
        description: Where the cluster was described, for messages.

    Raises:
        ClusterError: If somebody is not there by the start-up deadline.
        ClusterConfigError: If this worker's port is taken, or this process is in
            another cluster already.
        RuntimeError: If JAX has started its devices before.
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
    names = [task.name for task in tasks]
    addresses = [task.address for task in tasks]
    if jax.distributed.is_initialized():
        _check_order(names, index, description)
    else:
        _connect(names, addresses, index, timeouts)
    members = Workers(
        names,
        addresses,
        index,
        store=Store.of_this_process(),
        timeouts=timeouts,
    )
    workers.set_current(members)
    _joined = (key, members)
    if members.watch is not None:
        members.watch.start()
        dispatch_log.set_current(members.watch.log)
        excepthook.report_exceptions(members, members.watch)
        atexit.register(_leave, members)
    return members


def join_detected(timeouts: Timeouts) -> Workers | None:
    """Join the cluster that JAX itself finds here; None if it finds none."""
    if not jax.distributed.is_initialized():
        if not _jax_detects_cluster():
            return None
        _check_devices_not_started()
        try:
            jax.distributed.initialize(
                initialization_timeout=int(timeouts.startup),
                heartbeat_timeout_seconds=_JAX_TIMEOUT,
            )
        except ValueError:  # JAX's way to say that it found none.
            return None
    count = jax.process_count()
    if count == 1:
        return None
    # Addresses are JAX's secret: the spec only gives the workers names.
    cluster = ClusterSpec({"worker": [f"process-{i}:0" for i in range(count)]})
    return join(cluster, jax.process_index(), timeouts, "JAX")


def _jax_detects_cluster() -> bool:
    """Whether there are signs of a cluster around this process.

    `jax.distributed.initialize` looks for them too, but refuses first if JAX has
    started its devices, which a process that is alone may do whenever it likes.
    """
    return any(kind.is_env_present() for kind in cluster_kinds())


def _check_order(names: Sequence[str], index: int, description: str) -> None:
    here = (jax.process_count(), jax.process_index())
    if here != (len(names), index):
        raise ClusterConfigError(
            f"jax.distributed.initialize was called for process {here[1]} of {here[0]},"
            f" but {description} says process {index} of {len(names)} "
            f"({listed(names)}). Leave the call out, or make them agree."
        )


def _connect(
    names: Sequence[str], addresses: Sequence[str], index: int, timeouts: Timeouts
) -> None:
    _check_devices_not_started()
    # JAX would swallow SIGTERM from now on, to tell others of a preemption.
    jax.config.update("jax_enable_preemption_service", False)
    extra = {}
    own = parse_address(addresses[index])
    others = [parse_address(x) for i, x in enumerate(addresses) if i != index]
    host = host_to_bind(own, others)
    with _presence(addresses[index], host, is_chief=index == 0):
        if index == 0:
            service = coordination_service.start(
                own.port,
                len(names),
                linger_seconds=timeouts.heartbeat + 10,
                host=host,
                timeout=timeouts.startup,
            )
            atexit.register(coordination_service.stop, service)
            # Process 0 starts a service whatever we say. Nobody will connect to it.
            extra["coordinator_bind_address"] = "localhost:0"
        _initialize(names, addresses, index, timeouts, extra)
    # Only now all others' names are sure to be known.
    listen_for(address for i, address in enumerate(addresses) if i != index)


def _initialize(
    names: Sequence[str],
    addresses: Sequence[str],
    index: int,
    timeouts: Timeouts,
    extra: dict[str, Any],
) -> None:
    """Connect in a thread, so that this one can say who is missing."""
    outcome: list[BaseException | None] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                addresses[0],
                len(names),
                index,
                cluster_detection_method="deactivate",
                initialization_timeout=_JAX_TIMEOUT,
                heartbeat_timeout_seconds=_JAX_TIMEOUT,
                shutdown_timeout_seconds=10,
                **extra,
            )
            outcome.append(None)
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            outcome.append(error)

    thread = threading.Thread(target=connect, name="replicax-connect", daemon=True)
    thread.start()

    def late() -> NoReturn:
        absent = _absent(names, addresses, index)
        excepthook.retry_if_not_caught(names[index])
        raise ClusterError(
            f"{names[index]}: {absent or 'a worker'} did not come within "
            f"{timeouts.startup:.0f} s. Start the same script there with the "
            "same cluster, see that its port can be reached from here, or give "
            "it more time (rx.Timeouts(startup=...))."
        )

    def reminder(waited: float) -> str:
        absent = _absent(names, addresses, index)
        whom = absent or "the others, which are all there, to begin"
        return f"{names[index]} has waited {waited:.0f} s for {whom}"

    (error,) = wait_for(
        lambda: outcome or None,
        timeouts.startup,
        late=late,
        reminder=reminder,
        is_early=True,
        pauses=(1.0, 1.0),
        sleep=thread.join,
    )
    if error is not None:
        raise error


def _absent(names: Sequence[str], addresses: Sequence[str], index: int) -> str:
    """The workers that do not answer at their addresses."""
    others = [i for i in range(len(names)) if i != index]
    # Each one that is down takes a second to say so.
    with ThreadPoolExecutor(_MOST_PROBES) as pool:
        answers = pool.map(_answers, [addresses[i] for i in others])
    return listed(
        (
            f"{names[i]} ({addresses[i]})"
            for i, answer in zip(others, answers, strict=True)
            if not answer
        ),
        nobody="",
    )


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError):
        host, port = parse_address(address)
        socket.create_connection((host, port), timeout=1.0).close()
        return True
    return False


@contextlib.contextmanager
def _presence(address: str, host: str | None, *, is_chief: bool) -> Iterator[None]:
    """Take this worker's port while it waits, so that others see it is there.

    The chief's is that of the coordination service, which must find it free.
    """
    with contextlib.ExitStack() as place:
        try:
            place.enter_context(listener(host, parse_address(address).port))
        except OSError as error:
            raise ClusterConfigError(
                f"this worker's address is {address}, but its port cannot be used: "
                f"{error.strerror}. Another program, or another start of the same task,"
                " has it. End that, or give this task another port on all workers."
            ) from error
        if is_chief:
            place.close()
        yield


def _check_devices_not_started() -> None:
    name = "jax_num_cpu_devices"
    before = getattr(jax.config, name)
    try:
        # Refused after the devices are started, but for the value that it has. Before,
        # it is harmless to change it and back.
        jax.config.update(name, before + 1)
        jax.config.update(name, before)
    except RuntimeError as error:
        raise RuntimeError(
            "JAX has already started this process' devices alone. Create the strategy "
            "at the top of the script, before any array, model, dataset on a device or "
            "other strategy."
        ) from error


def _leave(members: Workers) -> None:
    """Wait for the others' scripts to end, so that nobody's steps lack this worker."""
    watch = members.watch
    if watch is None:
        return
    watch.leave()

    def running() -> list[str]:
        return [sign.full_name for sign in watch.signs if not sign.has_left]

    def is_complete() -> bool | None:
        if not running() and watch.all_did_the_same:
            return True
        return False if watch.is_missed else None

    if not wait_for(
        is_complete,
        members.timeouts.shutdown,
        late=lambda: watch.fail(_unaccompanied(members, watch, running())),
        reminder=lambda _: f"{members.name} is done and waits for {listed(running())}",
    ):
        print(
            f"replicax: {members.name} ended its script, but "
            f"{listed(running(), nobody='another worker')} "
            "needed it for more steps. All workers must run the same steps.",
            file=sys.stderr,
        )
        watch.close()
        # The service goes on until the others have ended.
        atexit.unregister(coordination_service.stop)
        Store.abandon()
        return
    watch.close()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.distributed.shutdown()


def _unaccompanied(
    members: Workers, watch: Watch, running: Sequence[str]
) -> FailureReport:
    return FailureReport(
        task=members.name,
        culprit=running[0].split(" ")[0],
        kind="lost",
        message=f"{listed(running)} did not come to the end of the script within"
        f" {members.timeouts.shutdown:.0f} s (rx.Timeouts(shutdown=...)).",
        exit_code=int(ExitCode.RETRY),
        steps=watch.steps,
    )
