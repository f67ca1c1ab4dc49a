"""Where the TPU compiler is not installed, what needs it is skipped."""

import pytest

from replicax.planning import compiler


@pytest.fixture(scope="session")
def tpu_compiler() -> None:
    """Skip without libtpu."""
    if compiler.find_libtpu() is None:
        pytest.skip("the TPU compiler, libtpu, is not here (Linux x86-64 only)")
