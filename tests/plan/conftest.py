"""Where the TPU compiler is not installed, what needs it is skipped."""

import importlib.util

import pytest


@pytest.fixture(scope="session")
def tpu_compiler() -> None:
    """Skip without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler, libtpu, is not installed (Linux x86-64 only)")
