"""What each process of a peer does: it trains when it is told to.

Lines on standard input say how many steps to do; the answer is one line of JSON with
the seconds they took, the loss and the memory. Between them the process waits, so peers
take turns on the same machine.
"""

import json
import os
import resource
import string
import sys
import time
from collections.abc import Callable

import numpy as np
from cases import case_of

CASE = case_of(os.environ["BENCH_CASE"], os.environ.get("BENCH_TINY") == "1")
LOOP = os.environ.get("BENCH_LOOP", "custom")  # or "fit", "fit32"
STEPS_PER_CALL = int(LOOP.lstrip(string.ascii_lowercase) or 1)
PLATFORM = os.environ.get("BENCH_PLATFORM", "cpu")  # or "cuda"
# Loops of one's own have their data on the device, and torch compiles.
ACCELERATED = os.environ.get("BENCH_ACCELERATED") == "1"
RANK = int(os.environ.get("BENCH_RANK", "0"))
WORLD = int(os.environ.get("BENCH_WORLD", "1"))  # processes
DEVICES = int(os.environ.get("BENCH_DEVICES", "1"))  # of this process
ADDRESSES = os.environ.get("BENCH_ADDRESSES", "").split()
BATCH = int(os.environ["BENCH_BATCH"])  # of all processes and devices together
COMPRESSION = os.environ.get("BENCH_COMPRESSION") or None  # such as "float16"
SHARD_UPDATE = os.environ.get("BENCH_SHARD_UPDATE") == "1"
CORES = len(os.sched_getaffinity(0))
X, Y = CASE.data(BATCH)
NUM_BATCHES = len(X) // BATCH  # Then they begin again.


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    """A global batch."""
    first = index * BATCH % len(X)
    return X[first : first + BATCH], Y[first : first + BATCH]


def local_batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    """This process' part of it."""
    x, y = batch(index)
    size = BATCH // WORLD
    return x[RANK * size :][:size], y[RANK * size :][:size]


def resident_bytes() -> int:
    """Memory that this process has now; for `serve`."""
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def jax_peak_bytes() -> int:
    """The largest memory so far of JAX' device; 0 for a CPU, which does not say."""
    import jax  # Not every peer has it.

    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else 0


def rows(start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of so many global batches one after another, as `fit` takes them."""
    chosen = np.arange(start * BATCH, (start + count) * BATCH) % len(X)
    return X[chosen], Y[chosen]


def serve(
    train: Callable[[int, int], float],
    prepare: Callable[[int, int], None] = lambda start, count: None,
    resident: int = 0,
    wait: Callable[[], object] = lambda: None,
    device_peak: Callable[[], int] = lambda: 0,
) -> None:
    """Answer the driver until it closes the pipe.

    Args:
        train: Does steps `start` to `start + count - 1`, waits for them, and returns
            the last one's loss, the mean over the global batch; `fit`'s is the mean
            over its steps.
        prepare: Called with the same numbers before, and not timed: it lays out the
            arrays for `fit`.
        resident: Memory when all was imported and before the model was made, bytes;
            what training takes is counted from there.
        wait: Waits until all that was computed is there, not the loss alone; timed.
        device_peak: The largest memory of the device so far, bytes.
    """
    _answer(resident=resident)
    start = 0
    for line in sys.stdin:
        count = int(line)
        prepare(start, count)
        cpu, begin = time.process_time(), time.perf_counter()
        loss = train(start, count)
        wait()
        seconds = time.perf_counter() - begin
        cpu = time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        _answer(
            seconds=seconds,
            cpu=cpu,
            loss=float(loss),
            peak=peak,
            device_peak=device_peak(),
        )
        start += count


def _answer(**values: float) -> None:
    print("BENCH " + json.dumps(values), flush=True)
