"""Freed memory: returned, or in huge pages; each test runs a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not ENABLED.exists() or "[never]" in ENABLED.read_text(),
        reason="the kernel has no huge pages",
    ),
]

RETURNED = """
import ctypes, os
import replicax as rx

strategy = rx.OneDeviceStrategy("cpu:0")
strategy.run(lambda: 1)  # Starts JAX.
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
pieces = [libc.malloc(2**16) for _ in range(4096)]
for piece in pieces:
    ctypes.memset(ctypes.c_void_p(piece), 1, 2**16)
for piece in pieces[:-1]:  # The last one is above all, so that glibc keeps them.
    libc.free(piece)
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
strategy.run(lambda: 2)
print((before - resident()) >> 20)
"""


def test_a_compiled_program_returns_freed_memory() -> None:
    assert int(run(RETURNED, REPLICAX_CPU="").stdout) > 200  # MiB
    assert int(run(RETURNED, REPLICAX_CPU="off").stdout) < 20


SCRIPT = """
import jax.numpy as jnp, numpy as np
import replicax as rx
from replicax.cpu.memory import use_huge_pages

strategy = rx.OneDeviceStrategy("cpu:0")
# Each step needs 32 MB for its result, and 32 MB for an intermediate array.
x = np.arange(2**23, dtype="float32")
for _ in range(3):
    y = strategy.run(lambda x: jnp.flip(x) + 1, (x,))
(y,) = strategy.experimental_local_results(y)
np.testing.assert_array_equal(y, np.flip(x) + 1)
heap = False
huge = 0
for line in open("/proc/self/smaps"):
    if " " in line and "-" in line.split()[0]:
        heap = line.endswith("[heap]\\n")
    elif heap and line.startswith("AnonHugePages"):
        huge += int(line.split()[1])
# NumPy asks for huge pages for its arrays, such as x, wherever they are.
print(use_huge_pages(), huge > 50_000)
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "REPLICAX_CPU": "tuned", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def test_tuned_steps_use_huge_pages() -> None:
    assert run(SCRIPT).stdout.split()[-2:] == ["True", "True"]


@pytest.mark.slow
def test_malloc_is_unchanged_by_default() -> None:
    assert run(SCRIPT, REPLICAX_CPU="").stdout.split()[-2:] == ["False", "False"]


FAULTS = """
import os, resource
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import replicax as rx
rx.OneDeviceStrategy("cpu:0")
import jax, jax.numpy as jnp
from replicax.cpu.memory import use_huge_pages

# 144 MB between the product and the norm, more than a thread's own heap can hold.
step = jax.jit(lambda x: jnp.linalg.norm(x @ x.T, axis=1))
x = jnp.ones((6000, 8))
for i in range(8):
    step(x).block_until_ready()
    if i == 0:
        assert use_huge_pages()
    if i == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


@pytest.mark.slow
def test_threads_of_jax_share_the_heap_on_one_core() -> None:
    """With a heap for each thread, there are 27,000 page faults in every step."""
    assert int(run(FAULTS).stdout) < 1000


FAULTS_OF_A_STRATEGY = """
import os, resource
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import numpy as np
import replicax as rx
import jax, jax.numpy as jnp

# Ten arrays of 24 MB wait for the backward pass, or three of 72.
num_layers, width = {layers}
x = np.ones((6000, width), "float32")
layer = np.ones((width, 4), "float32"), np.ones((4, width), "float32")
weights = [layer] * num_layers

def loss(weights, x):
    for a, b in weights:
        x = jnp.tanh(x @ a @ b)
    return jnp.mean(x)

strategy, counts = rx.OneDeviceStrategy("cpu:0"), []
for _ in range(8):
    jax.block_until_ready(strategy.run(lambda: jax.grad(loss)(weights, x)))
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
# On a busy machine, some threads compute their first step late and then allocate.
print(min(after - before for before, after in zip(counts, counts[1:])))
"""


def faults(script: str, **environment: str) -> int:
    """Run a script that prints the page faults of a step."""
    ended = run(script, **environment)
    assert "limit" not in ended.stderr  # XLA's warning of arrays above `heap_bytes()`.
    return int(ended.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not Linux")
def test_a_thread_keeps_the_pieces_of_a_step() -> None:
    script = FAULTS_OF_A_STRATEGY.format(layers="10, 1000")
    assert faults(script, XLA_FLAGS="") < 1000
    default_of_xla = "--xla_multiheap_size_constraint_per_heap=-1"
    assert faults(script, XLA_FLAGS=default_of_xla) > 20_000


@pytest.mark.slow
def test_xla_does_not_warn_of_arrays_above_the_limit() -> None:
    faults(FAULTS_OF_A_STRATEGY.format(layers="3, 3000"), XLA_FLAGS="")


FAULTS_OF_A_SERVER = """
import resource
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import replicax as rx
from replicax.ps.partition import VariableInfo, place
from replicax.ps.server_optimizer import ServerOptimizer

size = 2**22
w = VariableInfo(path="w", shape=(size,), dtype="float32")
server = ServerOptimizer(place("weights", {"kind": "add"}, [w], 1), 0)
vectors, state = server.start({"float32": np.zeros(size, "float32")})


def receive(vectors, state):
    received = {"float32": np.ones(size, "float32")}
    vectors, state = server.apply(vectors, state, received)
    vectors["float32"].block_until_ready()
    return vectors, state


counts, connection = [], ThreadPoolExecutor(1)
for _ in range(240):  # XLA's threads get heaps of their own by and by.
    vectors, state = connection.submit(receive, vectors, state).result()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
assert vectors["float32"][-1] == 240
print((counts[-1] - counts[-101]) // 100)
"""


def test_servers_keep_the_memory_of_received_arrays() -> None:
    """Otherwise an array of 16 MiB needs 4,096 new pages in a quarter of steps."""
    assert faults(FAULTS_OF_A_SERVER) < 400
