"""The main function of a parameter server's process."""

import json
import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

import jax

from replicax._private.jax import has_devices
from replicax._util.files import write_whole
from replicax._util.waiting import wait_for
from replicax.cluster.config import TaskConfig
from replicax.cluster.failure import REPORT_DIR, STATUS_FILE, ExitCode
from replicax.cluster.timeouts import Timeouts
from replicax.errors import ClusterMismatchError
from replicax.ps.board import Board
from replicax.ps.call_log import note_nothing
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
_LINGERED_BEATS = 2.5  # After a failure, of which workers hear in their heartbeats.
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
    """Serve until the job is over, then end the process.

    `SystemExit` has 0 when the chief has ended with success, 1 when the job has failed.
    Without a `snapshot_dir` there are no snapshots.
    """
    if not has_devices():
        # A server computes on the CPU. JAX would take most of the GPUs' memory, too.
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
    note = note_nothing if snapshots is None else snapshots.journal.note
    store = VariableStore(server, num_servers, note=note)
    workers = [task.name for task in config.cluster.workers]
    board = Board(workers, timeouts, note=note) if server == 0 else None
    if snapshots is not None:
        _restore(snapshots, store, board)
        store.flush = snapshots.flush
    if board is not None:
        board.put(JOB, uuid.uuid4().hex)  # The one of a snapshot stands.
    # The other servers learn of the end from the first one's board.
    first = config.cluster.task_address("ps", 0)
    service = Service(address, store, board, credentials)
    service.serve_in_thread()
    _logger.info("ps:%d serves at %s", server, address)
    failure = None
    try:
        if board is None:
            failure = _watch_first(server, num_servers, first, credentials, timeouts)
        else:
            beat = beat_seconds(len(workers), timeouts.heartbeat)
            failure = _until_over(board, num_servers, _LINGERED_BEATS * beat)
    finally:
        service.close()
        _log_losses(store)
        _report(store, board)
        if snapshots is not None:
            # With the board of a failed job the next one would fail at once.
            snapshots.close(write=failure is None)
    if failure is not None:
        _logger.error("ps:%d ends: %s", server, failure)
        raise SystemExit(int(ExitCode.FAILED))
    if snapshots is not None:
        snapshots.finish()
    _logger.info("ps:%d ends: the job is done", server)
    raise SystemExit(int(ExitCode.DONE))


def _log_losses(store: VariableStore) -> None:
    """At the end, log the updates that were lost, and the number that was applied."""
    store.log_losses()
    status = store.status()
    if status["lost"]:
        _logger.warning(
            "ps:%d ends with %d updates in its values; %d of %d that were made are "
            "lost, as it was restarted from snapshots.",
            store.server,
            status["applied"],
            status["lost"],
            status["applied"] + status["lost"],
        )


def _report(store: VariableStore, board: Board | None) -> None:
    """Write the last counts for the launcher's table."""
    folder = os.environ.get(REPORT_DIR)
    if folder:
        status = {"server": store.status(), "board": board and board.status()}
        write_whole(Path(folder) / STATUS_FILE, json.dumps(status))


def _restore(snapshots: Snapshots, store: VariableStore, board: Board | None) -> None:
    """Restore the newest snapshot, if there is one; write others from now on."""
    if (found := snapshots.restore()) is not None:
        journal = snapshots.journal.newest
        store.load_state(found.state, journal)
        if board is not None and found.board is not None:
            board.load_state(found.board, journal)
        _logger.warning(
            "ps:%d goes on from its snapshot %s, after %d updates",
            store.server,
            found.path,
            store.num_updates,
        )
    snapshots.start(store, None if board is None else board.state)


def _until_over(
    board: Board, num_servers: int, linger_after_failure: float
) -> str | None:
    """Wait until the job ends; return the failure, or None."""
    failure = None
    while failure is None and not board.is_done():
        failure = board.failed()
        time.sleep(_POLL_SECONDS)
    # The others have to hear of it before the board is gone.
    others = {_heard(i) for i in range(1, num_servers)}
    wait_for(
        lambda: all(board.get(key) is not None for key in others) or None,
        FAREWELL_SECONDS,
        late=lambda: False,
        pauses=(_POLL_SECONDS, _POLL_SECONDS),
    )
    failed = failure is not None
    time.sleep(linger_after_failure if failed else _LINGER_SECONDS)
    return failure


def _heard(server: int) -> str:
    return f"ps:{server} has heard of the end"


def _watch_first(
    server: int,
    num_servers: int,
    first: str,
    credentials: Credentials,
    timeouts: Timeouts,
) -> str | None:
    """Poll the first server until the job ends; return the failure, or None."""
    with Connection(
        first,
        credentials,
        task="ps:0",
        caller=f"ps:{server}",
        retry_timeout_seconds=timeouts.startup,
    ) as connection:
        seen = False
        while True:
            try:
                done = connection.call("board.is_done")
                failure: Any = connection.call("board.failed")
                if done or failure is not None:
                    connection.call("board.put", key=_heard(server), value=True)
                    return None if done else failure
            except ConnectionLost as lost:
                return str(lost) if seen else f"the job did not begin: {lost}"
            except ClusterMismatchError as mismatch:
                return str(mismatch)
            if not seen:
                seen = True
                connection.retry_timeout_seconds = timeouts.server
            time.sleep(watch_seconds(num_servers))
