"""A wall clock that is set, back or forward, ends no training.

The clock of a process is moved by a library that stands before the C library, as
libfaketime does it; the machine's own clock is left alone.
"""

import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replicax.cluster import coordination_service

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or shutil.which("cc") is None,
        reason="needs Linux and a C compiler, for a clock that can be moved",
    ),
]

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *offset;

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("MOVED_CLOCK");
  int file = path ? open(path, O_RDONLY) : -1;
  if (file < 0) return;
  void *found = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) offset = found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = syscall(SYS_clock_gettime, clock, now);
  int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (!status && offset && is_wall) now->tv_sec += *offset;
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int status = syscall(SYS_gettimeofday, now, zone);
  if (!status && offset) now->tv_sec += *offset;
  return status;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
"""

CLIENT = """
import importlib, sys, time
make = importlib.import_module("jaxlib._jax").get_distributed_runtime_client
client = make(sys.argv[1], 0, init_timeout=60, heartbeat_timeout=24 * 3600)
client.connect()
print("connected", flush=True)
sys.stdin.readline()
client.key_value_set("a", str(time.time()))
print(client.blocking_key_value_get("a", 5000), flush=True)
client.shutdown()
"""


@pytest.fixture
def set_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Moves the clocks of processes that are started from now on, whenever called."""
    source, library, offset = (tmp_path / x for x in ("a.c", "a.so", "offset"))
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)

    def move(seconds: int) -> None:
        with offset.open("r+b" if offset.exists() else "wb") as file:
            file.write(struct.pack("l", seconds))

    move(0)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("MOVED_CLOCK", str(offset))
    return move


@pytest.mark.parametrize("seconds", [-600, 2 * 24 * 3600])
def test_the_coordination_service_goes_on(
    seconds: int, set_clock: Callable[[int], None]
) -> None:
    with coordinator_of_one() as (address, service):
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "connected\n"
        set_clock(seconds)
        time.sleep(2.5)  # It looks every second who gives signs of life.
        told, _ = client.communicate("go on\n", timeout=30)
        assert client.returncode == 0
        assert float(told) == pytest.approx(time.time() + seconds, abs=60)
        assert service.poll() is None


class coordinator_of_one:
    """A coordination service for one process."""

    def __enter__(self):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._process = coordination_service.start(port, 1, 30.0, host="127.0.0.1")
        return f"127.0.0.1:{port}", self._process

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()
