"""The memory that saving and restoring needs besides the arrays."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, pathlib
import numpy as np
from replicax.checkpoint import storage

def peak_of(call):
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = status("VmRSS")
    call()
    return (status("VmHWM") - before) / total

def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith(name + ":"))

folder = pathlib.Path(sys.argv[1])
rng = np.random.default_rng(0)
saved = {str(i): rng.normal(size=1 << 21).astype("float32") for i in range(24)}
total = sum(x.nbytes for x in saved.values())
contents = storage.Contents(
    arrays={name: storage.ShardedArray.of(x) for name, x in saved.items()},
    values={},
)
print(peak_of(lambda: storage.write(folder / "large", contents)))
found = {}

def restore():
    arrays = storage.read(folder / "large").arrays
    found.update((name, array.read()) for name, array in arrays.items())

print(peak_of(restore))
print(all((found[name] == x).all() for name, x in saved.items()), len(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_saving_needs_no_second_copy(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    output = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    save, restore, *equal = output.split()
    assert equal == ["True", "24"]
    assert float(save) < 0.25
    assert float(restore) < 1.25  # The restored arrays are 1.
