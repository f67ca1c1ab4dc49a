"""FSDP by one's own `jax.jit`, compiled by the real CUDA compiler; no card runs it."""

import pytest
from tests.jax_loops.fsdp import WEIGHT_BYTES, compiled

from replicax.planning.compiler import require_cuda

try:
    require_cuda("h100:8")
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_program_is_that_of_shardings_by_hand() -> None:
    program = compiled("h100:8", by_hand=False)
    assert program == compiled("h100:8", by_hand=True)
    sent = {
        kind: sum(c.bytes * c.count for c in program.collectives if c.kind == kind)
        for kind in ("all-gather", "reduce-scatter")
    }
    assert sent == {"all-gather": WEIGHT_BYTES, "reduce-scatter": WEIGHT_BYTES}
