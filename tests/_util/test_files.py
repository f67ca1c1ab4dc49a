"""Files and folders that are complete or absent, also when a process is killed."""

import errno
import os
import stat
import time
from pathlib import Path

import pytest

from replicax._util.files import (
    complete_folder,
    leftovers,
    part_of,
    publish,
    remove_folder,
    temporary_folder,
    why_not_written,
    write_whole,
)


def fill(path: Path, text: str, *, replace: bool = False) -> None:
    with temporary_folder(part_of(path)) as part:
        (part / "inner").mkdir()
        (part / "inner" / "file").write_text(text)
        publish(part, path, replace=replace)


def text_of(path: Path) -> str:
    return (path / "inner" / "file").read_text()


def test_all_of_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, (tmp_path / "x").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    fill(tmp_path / "x", "1")
    inodes = [
        os.stat(tmp_path / name).st_ino for name in ("x/inner/file", "x/inner", "x", "")
    ]
    assert synced == list(zip(inodes, (False, False, False, True), strict=True))


def test_a_block_that_fails_leaves_nothing(tmp_path):
    def fail() -> None:
        with temporary_folder(tmp_path / "p") as part:
            (part / "file").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_only_with_replace(tmp_path):
    path = tmp_path / "x"
    fill(path, "1")
    with pytest.raises(FileExistsError, match="x"):
        fill(path, "2")
    assert text_of(path) == "1"
    fill(path, "2", replace=True)
    assert text_of(path) == "2"
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_folder_reserves_its_name_until_it_is_filled(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.mkdir()
    renamed = []
    rename = Path.rename

    def record(source: Path, target: Path) -> Path:
        renamed.append(source)
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", record)
    fill(path, "1", replace=True)
    assert renamed == [part_of(path)]  # Nobody can take the name between two renames.
    assert text_of(path) == "1"


def test_a_process_that_ends_between_two_renames(tmp_path):
    path = tmp_path / "x"
    fill(path, "1")
    path.rename(tmp_path / ".x.old")
    part_of(path).mkdir()
    assert text_of(complete_folder(path)) == "1"
    fill(path, "2", replace=True)
    assert text_of(complete_folder(path)) == "2"
    assert list(tmp_path.iterdir()) == [path]


def test_removing(tmp_path):
    path = tmp_path / "x"
    fill(path, "1")
    part_of(path).mkdir()  # An earlier process began to remove it.
    remove_folder(path)
    remove_folder(path)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_a_leftover_is_removed_leaves_the_same_name(tmp_path, monkeypatch):
    part = tmp_path / ".x-1.part"
    part.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: None)
        remove_folder(part)
    assert leftovers(tmp_path, r"x-\d+") == [part]
    remove_folder(part)
    assert leftovers(tmp_path, r"x-\d+") == []


def test_leftovers(tmp_path):
    assert leftovers(tmp_path / "none", "x") == []
    for name in (".x-1.part", ".x-2.part", ".y-1.part", "x-1", ".x-3.old"):
        (tmp_path / name).mkdir()
    (tmp_path / ".x-4.part").write_text("")
    found = [tmp_path / ".x-1.part", tmp_path / ".x-2.part"]
    assert sorted(leftovers(tmp_path, r"x-\d+")) == found
    hour_ago = time.time() - 3600
    os.utime(found[0], (hour_ago, hour_ago))
    assert leftovers(tmp_path, r"x-\d+", idle_seconds=1800) == found[:1]


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "x"
    write_whole(path, "old")
    path.chmod(0o751)
    write_whole(path, b"new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", "text")
    assert sorted(os.listdir(tmp_path)) == ["folder", "x"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_errors_of_full_disks_name_the_sizes(tmp_path, number):
    folder = tmp_path / "a" / "b"
    why = why_not_written(OSError(number, "x"), folder, "it has 7 bytes")
    assert why.startswith(f"{os.strerror(number)}: it has 7 bytes, and {folder} has")
    assert "denied" in why_not_written(OSError(errno.EACCES, "denied"), folder, "it")
