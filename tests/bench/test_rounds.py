"""Real peers, measured in turns."""

import shutil
import sys

import pytest

from replicax.bench.environments import EnvironmentMissingError, python_of
from replicax.bench.rounds import measure
from replicax.bench.tables import disagreeing, markdown

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(shutil.which("taskset") is None, reason="there is no taskset"),
    pytest.mark.timeout(600),
]


def measured(case, layout, **pythons):
    return measure(
        case,
        layout,
        {"here": sys.executable, **pythons},
        rounds=2,
        seconds=0.05,
        limit_seconds=250,
        tell=print,
    )


def test_all_compute_the_same_in_two_processes() -> None:
    """Here the environments of other libraries are missing, or lack the library."""
    group = measured("f", "processes", torch=sys.executable)
    assert list(group["entries"]) == [
        "bare JAX",
        "replicax run",
        "replicax fit",
        "replicax fit, 1 process",
        "replicax fit, twice the batch",
    ]
    assert disagreeing(group) == {}
    for entry in group["entries"].values():
        assert len(entry["seconds"]) == 2
        assert min(entry["seconds"]) > 0
        assert entry["memory_bytes"] > 0
    assert set(group["left_out"]) == {
        "torch DDP",
        "torch, 1 process",
        "torch DDP, twice the batch",
        "TF fit, tf_keras",
        "TF run, tf_keras",
    }
    assert "No module named 'torch'" in group["left_out"]["torch DDP"]
    assert "no environment tensorflow" in group["left_out"]["TF fit, tf_keras"]
    assert "replicax fit, 1 process" in markdown([group])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "logical"])
@pytest.mark.parametrize("case", list("abcde"))
def test_all_compute_the_same(case, layout) -> None:
    group = measured(case, layout)
    off = disagreeing(group)
    if layout == "logical" and case in "cd":
        # Its BatchNormalization takes means over the global batch.
        off.pop("Keras DataParallel fit")
    assert off == {}


def test_an_environment_that_cannot_be_made_is_named(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EnvironmentMissingError):
        python_of("torch", blocked, print)
