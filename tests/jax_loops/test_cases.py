"""Steps as JAX users write them: equal to one device, or refused by name."""

from collections.abc import Iterator

import pytest
from tests.jax_loops.cases import STRATEGIES, Case, assert_equal
from tests.jax_loops.equinox_cases import EQUINOX
from tests.jax_loops.flax_cases import LINEN, NNX
from tests.jax_loops.plain_cases import OPTAX, PLAIN

TABLES = {
    "plain": PLAIN,
    "optax": OPTAX,
    "nnx": NNX,
    "linen": LINEN,
    "equinox": EQUINOX,
}
# Quick: all cells of one case, and those of several devices with several replicas each.
# `test_optax` has quick tests of Optax.
QUICK_CASE = "MLP, momentum, metrics"
QUICK = "virtual"
SLOW = ("optax", "linen")
LONG = ("LoRA", "RNN", "attention", "nnx.vmap and nnx.scan", "stacked layers and scan")


def cells() -> Iterator[object]:
    for library, cases in TABLES.items():
        for name, case in cases.items():
            for strategy in STRATEGIES:
                is_quick = name == QUICK_CASE or (
                    strategy == QUICK and library not in SLOW and name not in LONG
                )
                marks = [] if is_quick else [pytest.mark.slow]
                id = f"{library}: {name}, {strategy}"
                yield pytest.param(case, strategy, id=id, marks=marks)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(("case", "name"), [*cells()])
def test_a_cell_is_equal_or_refused(case: Case, name: str) -> None:
    strategy = STRATEGIES[name]()
    refusal = case.refusal(name)
    if refusal is not None:
        with pytest.raises(refusal[0], match=refusal[1]):
            case.actual(strategy)
        return
    expected = case.expected(strategy.num_replicas_in_sync)
    assert_equal(case.actual(strategy), expected, case.rtol)
