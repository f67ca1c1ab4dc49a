"""Fixtures: the TPU compiler, or a skip; short measurements of this machine."""

import pytest

from replicax.planning import compiler, rates


@pytest.fixture(autouse=True)
def measurements_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for this machine multiply and sum small arrays, for numbers of no use."""
    monkeypatch.setattr(rates, "_CPU_SIZES", (64, 2**16))


@pytest.fixture(scope="session")
def tpu_compiler() -> None:
    """Skip without libtpu."""
    if compiler.find_libtpu() is None:
        pytest.skip("the TPU compiler, libtpu, is not here (Linux x86-64 only)")
