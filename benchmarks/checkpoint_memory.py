"""Bytes and peak memory of saving and restoring a sharded model, for each process.

On the CPU, the devices' arrays are in the memory of the process: the model's shards are
part of its resident memory before, and each peak is what comes on top.

    python benchmarks/checkpoint_memory.py --gigabytes 1 --folder /tmp
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import keras

import replicax as rx
from replicax.testing import run

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--gigabytes", type=float, default=1.0, help="of the weights")
parser.add_argument("--folder", default=tempfile.gettempdir(), help="for checkpoints")

COLUMNS, NUM_WEIGHTS = 4096, 16


def status(name: str) -> float:
    """A line of `/proc/self/status`, in GB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(name + ":")) / 1e6


def measured(call: Any) -> dict[str, float]:
    """Seconds of a call, and the peak of resident memory that it adds, in GB."""
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before, begin = status("VmRSS"), time.perf_counter()
    call()
    return {
        "seconds": time.perf_counter() - begin,
        "peak": status("VmHWM") - before,
    }


def save_and_restore(folder: str, gigabytes: float) -> dict[str, Any]:
    """Run in each worker: save, change the weights, restore."""
    strategy = rx.FullyShardedStrategy(timeouts=rx.Timeouts(startup=300))
    rows = int(gigabytes * 1e9 / 4 / COLUMNS / NUM_WEIGHTS) // 8 * 8
    with strategy.scope():
        weights = [
            keras.Variable(keras.random.normal((rows, COLUMNS), seed=i))
            for i in range(NUM_WEIGHTS)
        ]
    with rx.CheckpointManager(rx.Checkpoint(weights=weights), folder) as manager:

        def save() -> None:
            manager.save()
            manager.wait()

        written = status_of_io("write_bytes")
        saved = measured(save)
        written = status_of_io("write_bytes") - written
        restored = measured(manager.restore_or_initialize)
    return {"written": written, "save": saved, "restore": restored}


def status_of_io(name: str) -> float:
    """A line of `/proc/self/io`, in GB."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(name + ":")) / 1e9


def main(gigabytes: float, folder: str) -> None:
    """Print a table for one process of four devices and two of two devices."""
    print("| processes x devices | process | written | save: peak, time | restore |")
    print("|---|---|---|---|---|")
    for num_workers in (1, 2):
        path = tempfile.mkdtemp(dir=folder)
        try:
            results = run(
                save_and_restore,
                num_workers=num_workers,
                args=(path, gigabytes),
                logical_devices=4 // num_workers,
                deadline_seconds=600,
            )
        finally:
            shutil.rmtree(path)
        for name, value in results.returned.items():
            cells = [
                f"{value[what]['peak']:.2f} GB, {value[what]['seconds']:.1f} s"
                for what in ("save", "restore")
            ]
            written = f"{value['written']:.2f} GB"
            place = f"{num_workers} x {4 // num_workers}"
            print("|", " | ".join([place, name, written, *cells]), "|")


if __name__ == "__main__":
    arguments = parser.parse_args()
    main(arguments.gigabytes, arguments.folder)
