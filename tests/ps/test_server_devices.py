"""A parameter server computes on the CPU, and takes no accelerator from the workers."""

import atexit

import jax
import pytest

import replicax as rx
from replicax.testing import run

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(90)]


def show_platforms() -> str:
    # The constructor does not return in a server.
    atexit.register(lambda: print(f"platforms: {jax.config.values['jax_platforms']}"))
    rx.ParameterServerStrategy()
    return jax.default_backend()


def test_a_server_starts_no_accelerator() -> None:
    results = run(
        show_platforms,
        tasks={"worker": 1, "ps": 1},
        env={"JAX_PLATFORMS": ""},
        deadline_seconds=60,
    )
    assert "platforms: cpu" in results["ps:0"].output
    assert "platforms: cpu" not in results["worker:0"].output
