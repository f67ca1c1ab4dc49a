"""A background save that cannot start leaves nothing for the hooks of process exit."""

import threading

import numpy as np
import pytest

from replicax._util.files import FailedWrites
from replicax.checkpoint import background
from replicax.checkpoint.storage import Contents, ShardedArray


@pytest.fixture
def contents() -> Contents:
    return Contents(arrays={"w": ShardedArray.of(np.zeros(2))}, values={}, labels={})


def save(path, contents):
    return background.BackgroundSave(path, contents, [], [], FailedWrites())


def test_a_save_without_a_thread_is_not_awaited_at_exit(
    tmp_path, contents, monkeypatch
):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            save(tmp_path / "ckpt-1", contents)
    background._report_lost_saves()
    background.finish(tmp_path)
    later = save(tmp_path / "ckpt-2", contents)
    background.finish(tmp_path)
    assert later.error() is None
    assert (tmp_path / "ckpt-2").exists()
