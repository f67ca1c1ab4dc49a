"""JAX's compilation cache on disk: when it is on, its folder and its size."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from replicax._util.files import caches_folder
from replicax.strategies import compilation_cache

PROGRAM = """
import logging, os, sys
import jax, numpy as np
from jax import monitoring
import replicax as rx

logging.basicConfig(format="%(message)s", stream=sys.stdout)
hits = []
monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
)
rx.set_logical_devices(2)
{before}
strategy = rx.MirroredStrategy()
rx.OneDeviceStrategy("cpu:0")
{after}

value = strategy.run(lambda x: x @ x, (np.ones((8, 8), "float32"),))
total = float(np.sum(strategy.reduce("sum", value, None)))
print("hits", len(hits), "total", total)
"""
JAX_VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")


def run(
    home: Path, *, before: str = "", after: str = "", **environ: str
) -> tuple[str, str]:
    """The output and errors of a process with the working folder `home`."""
    inherited = {k: v for k, v in os.environ.items() if k not in JAX_VARIABLES}
    inherited.pop("REPLICAX_COMPILATION_CACHE", None)
    settings = {
        # Programs that compile quickly are kept, too.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, after=after)],
        env={**inherited, **settings, **environ},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "total 1024.0" in process.stdout, process.stdout
    return process.stdout, process.stderr


def entries(folder: Path) -> set[Path]:
    return set(folder.rglob("*-cache"))


@pytest.mark.slow
def test_it_is_on_by_default_and_for_the_user_only(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    run(tmp_path, **environ)
    folder = tmp_path / "replicax" / "compiled"
    kept = entries(tmp_path)
    assert kept == entries(folder) != set()
    assert folder.stat().st_mode & 0o077 == 0
    second, _ = run(tmp_path, **environ)
    assert f"hits {len(kept)} " in second


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({"REPLICAX_COMPILATION_CACHE": "off"}, marks=pytest.mark.slow),
        pytest.param({"JAX_ENABLE_COMPILATION_CACHE": "false"}, marks=pytest.mark.slow),
        pytest.param({"JAX_COMPILATION_CACHE_DIR": ""}, marks=pytest.mark.slow),
    ],
)
def test_off(tmp_path: Path, environ: dict[str, str]) -> None:
    run(tmp_path, **{"XDG_CACHE_HOME": str(tmp_path), **environ})
    assert not entries(tmp_path)


@pytest.mark.slow
def test_settings_of_the_user_win(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    setting = f"jax.config.update('jax_compilation_cache_dir', {str(theirs)!r} '/{{}}')"
    environ = {"REPLICAX_COMPILATION_CACHE": str(ours)}
    for number, how in enumerate(
        [
            {"JAX_COMPILATION_CACHE_DIR": str(theirs / "0")},
            {"before": setting.format(1)},
            {"after": setting.format(2)},
        ]
    ):
        run(tmp_path, **environ, **how)
        assert not entries(ours), how
        assert entries(theirs / str(number)), how


def test_a_folder_that_cannot_be_written_is_logged_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stdout, stderr = run(
        tmp_path, REPLICAX_COMPILATION_CACHE=str(tmp_path / "file" / "kept")
    )
    assert stdout.count("are not kept") == 1
    assert "Not a directory" in stdout
    assert "UserWarning" not in stderr


@pytest.mark.slow
def test_a_damaged_program_is_compiled_again(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    run(tmp_path, REPLICAX_COMPILATION_CACHE=str(kept))
    for path in entries(kept):
        path.write_bytes(path.read_bytes()[:100])
    stdout, stderr = run(tmp_path, REPLICAX_COMPILATION_CACHE=str(kept))
    assert "hits 0 " in stdout
    assert "Error reading persistent compilation cache entry" in stderr


def test_tpus_and_unknown_platforms_are_left_out() -> None:
    assert "gpu" in compilation_cache._SAFE_PLATFORMS
    assert not {"tpu", "metal"} & set(compilation_cache._SAFE_PLATFORMS)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that the user asks for, and no setting of JAX's cache."""
    for name in JAX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REPLICAX_COMPILATION_CACHE", str(tmp_path))
    of_the_tests = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", of_the_tests)


@pytest.mark.usefixtures("asked")
def test_only_what_xla_cannot_write_is_silent() -> None:
    writing = "Error writing persistent compilation cache entry for 'f': OSError: "
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert compilation_cache.turn_on.__wrapped__("cpu") is not None
        warnings.warn(f"{writing}Multiple temp buffer allocations", stacklevel=1)
        warnings.warn(f"{writing}No space left on device", stacklevel=1)
    assert [str(x.message) for x in seen] == [f"{writing}No space left on device"]


def test_jobs_of_several_processes_are_left_out(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert compilation_cache.turn_on.__wrapped__("gpu") is None
    assert jax.config.jax_compilation_cache_dir is None
    assert not list(asked.iterdir())


def test_folders_follow_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for platform, xdg, expected in (
        ("linux", "", "/home/me/.cache/replicax"),
        ("linux", "relative", "/home/me/.cache/replicax"),
        ("linux", "/big", "/big/replicax"),
        ("darwin", "", "/home/me/Library/Caches/replicax"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert caches_folder(os.environ) == Path(expected)


def test_folders_by_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for number in ("", "1", "18"):
        monkeypatch.setenv("NPROC", number)
        names.add(compilation_cache._threads_folder())
    assert len(names) == 3


def test_least_recently_used_programs_are_deleted_first(tmp_path: Path) -> None:
    folder = tmp_path / "threads-2"
    folder.mkdir()
    for age, name in enumerate(["new", "middle", "old"]):
        path = folder / f"jit_{name}-cache"
        path.write_bytes(bytes(10))
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "notes").write_bytes(bytes(100))
    compilation_cache._trim(tmp_path, 30)
    assert len(entries(tmp_path)) == 3
    compilation_cache._trim(tmp_path, 25)
    assert {p.name for p in entries(tmp_path)} == {"jit_new-cache", "jit_middle-cache"}
    assert (tmp_path / "notes").exists()


@pytest.mark.slow
def test_an_import_does_not_turn_it_on(tmp_path: Path) -> None:
    code = "import jax, replicax; print(jax.config.jax_compilation_cache_dir)"
    environ = {k: v for k, v in os.environ.items() if k not in JAX_VARIABLES}
    environ |= {"REPLICAX_COMPILATION_CACHE": str(tmp_path)}
    output = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True
    ).stdout
    assert output == "None\n"
    assert not list(tmp_path.iterdir())
