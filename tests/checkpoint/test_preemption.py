"""A custom loop that a signal stops, and that continues after a restart."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import keras
import pytest

import replicax as rx
from replicax.cluster.failure import ExitCode
from replicax.experimental import PreemptionCheckpointHandler
from replicax.testing import run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]


def loop(folder: str, victim: int | None = None) -> dict[str, Any]:
    strategy = rx.MultiWorkerMirroredStrategy(timeouts=rx.Timeouts(startup=90))
    with strategy.scope():
        total = keras.Variable(0.0)
    checkpoint = rx.Checkpoint(total=total)
    with PreemptionCheckpointHandler(None, checkpoint, folder) as handler:
        begin = handler.total_run_calls
        while handler.total_run_calls < 40:
            handler.run(strategy.run, lambda: total.assign_add(1.0))
            time.sleep(0.1)  # Long enough for the workers to agree before it ends.
            if handler.total_run_calls == 5 and strategy.workers.index == victim:
                os.kill(os.getpid(), signal.SIGTERM)
    return {"begin": begin, "total": float(total)}


def test_all_workers_stop_after_the_same_step_and_continue(tmp_path: Path) -> None:
    first = run(
        loop,
        num_workers=2,
        args=(str(tmp_path), 1),
        deadline_seconds=90,
        check=False,
    )
    assert set(first.exit_codes.values()) == {ExitCode.RETRY}
    steps = [re.findall(r"saved after step (\d+)", w.output) for w in first.values()]
    assert len(steps[0]) == 1
    assert steps[0] == steps[1]
    second = run(loop, num_workers=2, args=(str(tmp_path),), deadline_seconds=90)
    one, other = second.returned.values()
    assert one == other
    assert 5 <= one["begin"] < 40
    assert one["total"] == 40
    assert f"saved after step {one['begin']} in" in first["worker:0"].output


def test_a_checkpoint_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a Checkpoint needs checkpoint_dir"):
        PreemptionCheckpointHandler(None, rx.Checkpoint(step=0))
