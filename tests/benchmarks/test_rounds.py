"""Real peers, measured in turns."""

import shutil
import sys

import pytest

from bench.environments import EnvironmentMissingError, python_of
from bench.peers.cases import CASES
from bench.rounds import measure
from bench.tables import disagreeing, markdown

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(shutil.which("taskset") is None, reason="there is no taskset"),
    pytest.mark.timeout(600),
]


def measured(case, layout, tiny=False, **pythons):
    return measure(
        case,
        layout,
        {"here": sys.executable, **pythons},
        starts=2,
        rounds=1,
        seconds=0.05,
        limit_seconds=250,
        tell=print,
        tiny=tiny,
    )


@pytest.mark.slow
def test_all_compute_the_same_in_two_processes() -> None:
    """Here the environments of other libraries are missing, or lack the library."""
    group = measured("f", "processes", torch=sys.executable)
    assert list(group["entries"]) == [
        "bare JAX",
        "replicax run",
        "replicax fit",
        "replicax fit, tuned",
    ]
    assert disagreeing(group) == {}
    for entry in group["entries"].values():
        assert len(entry["seconds"]) == 2
        assert min(entry["seconds"]) > 0
        assert len(entry["first_step_seconds"]) == len(entry["memory_bytes"]) == 2
        assert min(entry["memory_bytes"]) > 0
    assert set(group["left_out"]) == {
        "torch DDP",
        "TF fit, tf_keras",
        "TF run, tf_keras",
    }
    assert "No module named 'torch'" in group["left_out"]["torch DDP"]
    assert "no environment tensorflow" in group["left_out"]["TF fit, tf_keras"]
    assert "2 starts with 1 rounds each" in markdown([group])


@pytest.mark.slow
def test_programs_for_a_gpu_compute_the_same() -> None:
    """A small one, on the CPU: bfloat16, data on the device, 8 steps in a call."""
    group = measured("h", "gpu", tiny=True)
    assert list(group["entries"]) == [
        "bare JAX",
        "replicax run",
        "replicax fit",
        "replicax fit, 8 steps",
        "Keras fit",
    ]
    assert disagreeing(group) == {}
    assert group["left_out"] == {"torch": "there is no environment torch"}
    # By hand it is Keras' forward pass to the last bit.
    losses = {name: entry["losses"] for name, entry in group["entries"].items()}
    assert losses["bare JAX"][0] == pytest.approx(losses["Keras fit"][0], rel=1e-5)
    assert group["steps"] % 8 == 0
    assert group["machine"]["gpu"] is None
    assert f"| {group['unit']}/s | utilisation |" in markdown([group])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"),
    [("a", "one"), ("a", "logical"), ("b", "logical"), ("i", "one"), ("j", "one")],
)
def test_all_compute_the_same(case, layout) -> None:
    """`make bench` itself compares the larger models; a small `h` is above."""
    assert disagreeing(measured(case, layout)) == {}


def test_operations_of_known_models_are_counted() -> None:
    """ResNet-50 "v1.5" has 4.09 billion products for an image."""
    assert CASES["g"].flops(2) == pytest.approx(2 * 6 * 4.09e9, rel=1e-3)
    assert CASES["a"].flops(1) is None
    transformer = CASES["h"]
    assert transformer.units(3) == 3 * 512
    weights = 12 * 12 * 1024**2 + 1024 * transformer.num_classes
    attention = 12 * 12 * 512 * 1024
    assert transformer.flops(1) == 512 * (6 * weights + attention)


def test_torch_for_a_gpu_is_never_installed(tmp_path) -> None:
    with pytest.raises(EnvironmentMissingError, match="--python torch=PATH"):
        python_of("torch", tmp_path, print, on_gpu=True)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_cannot_be_made_is_named(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(EnvironmentMissingError):
        python_of("torch", blocked, print)
