"""Real training steps, compiled by the real TPU compiler; no TPU runs them.

Each slice is described by libtpu. What is looked at: that the program compiles, which
collectives it has and how many bytes they carry, and whether it fits into memory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replicax.planning import compiler

pytestmark = pytest.mark.skipif(
    compiler.find_libtpu() is None,
    reason="libtpu, with the TPU compiler in it, is not here",
)

ROOT = Path(__file__).parents[2]
GIB = 2**30

# Name for the compiler: chips, hosts, memory of a chip as published.
SLICES = {
    "v5e:2x4": (8, 2, 16 * GIB),
    "v5e:16x16": (256, 64, 16 * GIB),
    "v5p:4x4x4": (64, 16, 95 * GIB),
}
SCALAR_BYTES = 4
# Sums and counts of the loss and the accuracy.
METRIC_BYTES = 4 * SCALAR_BYTES


def compile_step(
    program: str, *slices: str, timeout_seconds: float = 200
) -> list[dict[str, Any]]:
    process = subprocess.run(
        [sys.executable, "-m", "tests.tpu.compile_step", program, *slices],
        env={
            **os.environ,
            "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{ROOT}",
            "REPLICAX_TESTS_XLA_FLAGS": "",  # The TPU compiler does not know them.
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def assert_sums_gradients_only(found: dict[str, Any], further_bytes: int) -> None:
    """One all-reduce or a few, which carry the gradients and nothing that is large."""
    kinds = {c["kind"] for c in found["collectives"]}
    assert kinds == {"all-reduce"}
    carried = sum(c["bytes"] for c in found["collectives"])
    assert carried == found["weight_bytes"] + found["averaged_bytes"] + further_bytes


def assert_fits(found: dict[str, Any], memory_bytes: int) -> None:
    assert found["argument_bytes"] + found["temp_bytes"] < memory_bytes
    # The update is made in place: all but the logs lies where an argument was.
    assert found["output_bytes"] - found["alias_bytes"] < 4096


@pytest.mark.parametrize(
    ("program", "further_bytes", "num_scalars_averaged"),
    [
        ("mlp-fit", METRIC_BYTES, 0),
        pytest.param("mlp-loop", 0, 0, marks=pytest.mark.slow),
        pytest.param("cnn-fit", METRIC_BYTES, 64, marks=pytest.mark.slow),
    ],
)
def test_steps_sum_their_gradients_and_fit(
    program: str, further_bytes: int, num_scalars_averaged: int
) -> None:
    results = compile_step(program, *SLICES)
    assert [r["topology"] for r in results] == list(SLICES)
    for found, (chips, hosts, memory) in zip(results, SLICES.values(), strict=True):
        assert (found["num_devices"], found["num_hosts"]) == (chips, hosts)
        assert found["averaged_bytes"] == num_scalars_averaged * SCALAR_BYTES
        assert_sums_gradients_only(found, further_bytes)
        assert_fits(found, memory)
    # A replica's step is the same on 8 chips and on 256.
    small, large = results[:2]
    assert small["flops"] == large["flops"]
    assert small["argument_bytes"] == large["argument_bytes"]


def test_bring_up_while_a_plan_is_made() -> None:
    (found,) = compile_step("bring-up", "v5e:4x4")
    assert found == {
        "system": {
            "device_kind": "TPU v5 lite",
            "num_chips": 16,
            "num_devices": 16,
            "num_hosts": 4,
            "num_slices": 1,
            "mesh_shape": [4, 4, 1, 1],
        },
        "num_replicas": 16,
    }


@pytest.mark.slow
def test_one_host() -> None:
    (found,) = compile_step("mlp-loop", "v5p:2x2x1")
    assert found["mesh_shape"] == [2, 2, 1, 1]
    assert (found["num_devices"], found["num_hosts"]) == (4, 1)
    assert found["device_kind"].startswith("TPU v5")


@pytest.mark.slow
def test_the_order_of_devices_makes_no_difference() -> None:
    """Hosts' devices are together in ours; in JAX's order by coordinates not always."""
    small, *large = compile_step("orders", "v5e:2x4", "v5e:16x16", "v5p:4x4x4")
    for found in (small, *large):
        by_host, by_coordinates = found["algorithms"]
        assert by_host
        assert by_host == by_coordinates
        assert found["runs_of_one_host"][0] == found["num_hosts"]
    assert all(f["runs_of_one_host"][1] > f["num_hosts"] for f in large)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mobilenet() -> None:
    (found,) = compile_step("mobilenet-fit", "v5e:2x4", timeout_seconds=550)
    assert_sums_gradients_only(found, METRIC_BYTES)
    assert_fits(found, 16 * GIB)
