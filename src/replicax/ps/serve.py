"""The main function of a parameter server's process."""

import logging
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

import jax

from replicax._private.jax import has_devices
from replicax._util.waiting import wait_for
from replicax.cluster.config import TaskConfig
from replicax.cluster.failure import ExitCode
from replicax.cluster.timeouts import Timeouts
from replicax.errors import ClusterMismatchError
from replicax.ps.board import Board
from replicax.ps.call_log import append_nowhere
from replicax.ps.connection import Connection, ConnectionLost
from replicax.ps.credentials import Credentials
from replicax.ps.limits import beat_seconds, watch_seconds
from replicax.ps.service import Service
from replicax.ps.session import FAREWELL_SECONDS, JOB
from replicax.ps.snapshots import Snapshots
from replicax.ps.store import VariableStore

__all__ = ["serve"]

_POLL_SECONDS = 0.2
_LINGER_SECONDS = 0.5
_ENDED = "the job is over"  # Board key: True when server 0 has marked the job done.
# Server 0 still answers for this many heartbeat intervals after a failure, so that each
# worker learns of it.
_LINGERED_BEATS = 2.5
_logger = logging.getLogger("replicax")


def serve(
    config: TaskConfig,
    credentials: Credentials,
    timeouts: Timeouts,
    *,
    snapshot_dir: str | Path | None = None,
    snapshot_every_updates: int | None = None,
    snapshot_every_seconds: float | None = None,
) -> NoReturn:
    """Serve until the job ends, then end the process.

    Raises `SystemExit` with 0 if the chief has ended with success, with 1 if the job
    has failed. Without a `snapshot_dir` there are no snapshots.

    Server 0 marks its snapshots as done before it publishes the end of the job. If the
    job is killed in between, the other servers do not restore their snapshots either:
    server 0 has begun another job by then.
    """
    if not has_devices():
        # A server computes on the CPU. JAX must not reserve the memory of GPUs.
        jax.config.update("jax_platforms", "cpu")
    server = config.task_id or 0
    address = config.cluster.task_address("ps", server)
    num_servers = config.cluster.num_tasks("ps")
    snapshots = None
    if snapshot_dir is not None:
        snapshots = Snapshots(
            snapshot_dir,
            server,
            every_updates=snapshot_every_updates,
            every_seconds=snapshot_every_seconds,
        )
    append = append_nowhere if snapshots is None else snapshots.wal.append
    store = VariableStore(server, num_servers, append=append)
    workers = [task.name for task in config.cluster.workers]
    board = None
    if server == 0:
        board = Board(workers, timeouts, store.sessions, append=append)
    service = Service(address, store, board, credentials)
    failure = None
    try:
        if board is not None:
            _begin_job(snapshots, store, board)
            service.serve_in_thread()
            linger = _LINGERED_BEATS * beat_seconds(len(workers), timeouts.heartbeat)
            failure = _await_end(board, snapshots, num_servers, linger)
        else:
            # Server 0 has the job's id, and publishes the end of the job.
            with Connection(
                config.cluster.task_address("ps", 0),
                credentials,
                task="ps:0",
                caller=f"ps:{server}",
                retry_timeout_seconds=timeouts.startup,
                silence_timeout_seconds=timeouts.heartbeat,
            ) as server_0:
                if snapshots is not None:
                    _join_job(snapshots, store, server_0)
                service.serve_in_thread()
                failure = _watch_server_0(server, num_servers, server_0, timeouts)
    except (ConnectionLost, ClusterMismatchError) as error:
        failure = str(error)
    finally:
        service.close()
        _log_losses(store)
        if snapshots is not None:
            # No snapshot of a failed job: the next job would restore it and fail.
            snapshots.close(write=failure is None)
    if failure is not None:
        _logger.error("ps:%d ends: %s", server, failure)
        raise SystemExit(int(ExitCode.FAILED))
    if snapshots is not None and board is None:
        snapshots.mark_done()
    _logger.info("ps:%d ends: the job is done", server)
    raise SystemExit(int(ExitCode.DONE))


def _log_losses(store: VariableStore) -> None:
    counts = store.status()
    if counts["lost"]:
        _logger.warning(
            "ps:%d ends with %d updates in its values; %d others were lost when the "
            "server was restarted from its snapshots.",
            store.server,
            counts["applied"],
            counts["lost"],
        )


def _begin_job(snapshots: Snapshots | None, store: VariableStore, board: Board) -> None:
    """On server 0: begin a job, or continue that of the newest snapshot."""
    if snapshots is not None:
        _restore(snapshots, store, board)
    job = str(board.put(JOB, uuid.uuid4().hex))  # Keeps the id of a restored job.
    if snapshots is not None:
        snapshots.job = job
        snapshots.start(store, board.state)


def _join_job(snapshots: Snapshots, store: VariableStore, server_0: Connection) -> None:
    """On another server: join the job of server 0."""
    snapshots.job = server_0.call("board.get", key=JOB)
    _restore(snapshots, store)
    snapshots.start(store)


def _restore(
    snapshots: Snapshots, store: VariableStore, board: Board | None = None
) -> None:
    """Restore the newest snapshot, if any; let answers wait for `snapshots.flush`."""
    if (snapshot := snapshots.restore()) is not None:
        wal = snapshots.wal.newest
        store.load_state(snapshot.state, wal)
        if board is not None and snapshot.board is not None:
            board.load_state(snapshot.board, wal)
        _logger.warning(
            "ps:%d goes on from its snapshot %s, after %d updates",
            store.server,
            snapshot.path,
            store.num_updates,
        )
    store.flush = snapshots.flush


def _await_end(
    board: Board,
    snapshots: Snapshots | None,
    num_servers: int,
    linger_after_failure: float,
) -> str | None:
    """Wait until the job ends; return the failure, or None."""
    failure = None
    while failure is None and not board.is_done():
        failure = board.failed()
        time.sleep(_POLL_SECONDS)
    if failure is None:
        # Mark before publishing: see `serve`.
        if snapshots is not None:
            snapshots.mark_done()
        board.put(_ENDED, True)
    # The other servers must read the end or the failure before the board ends.
    others = {_end_read_key(i) for i in range(1, num_servers)}
    wait_for(
        lambda: all(board.get(key) is not None for key in others) or None,
        FAREWELL_SECONDS,
        late=lambda: False,
        pauses=(_POLL_SECONDS, _POLL_SECONDS),
    )
    failed = failure is not None
    time.sleep(linger_after_failure if failed else _LINGER_SECONDS)
    return failure


def _end_read_key(server: int) -> str:
    return f"ps:{server} has heard of the end"


def _watch_server_0(
    server: int, num_servers: int, server_0: Connection, timeouts: Timeouts
) -> str | None:
    """Poll server 0 until the job ends; return the failure, or None."""
    while True:
        is_over = server_0.call("board.get", key=_ENDED)
        failure: Any = server_0.call("board.failed")
        if is_over or failure is not None:
            server_0.call("board.put", key=_end_read_key(server), value=True)
            return None if is_over else failure
        # Server 0 has started. From now on, wait as long as its restart may take.
        server_0.retry_timeout_seconds = timeouts.server
        time.sleep(watch_seconds(num_servers))
