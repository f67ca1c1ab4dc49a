"""Steps as JAX users write them: equal to one device, or refused by name."""

from collections.abc import Iterator

import pytest
from tests.jax_loops.cases import STRATEGIES, Case, assert_equal
from tests.jax_loops.flax_cases import LINEN, NNX
from tests.jax_loops.plain_cases import OPTAX, PLAIN

TABLES = {"plain": PLAIN, "optax": OPTAX, "nnx": NNX, "linen": LINEN}
# Where users are; the other columns are slow.
QUICK = ("mirrored", "virtual")


def cells() -> Iterator[object]:
    for library, cases in TABLES.items():
        for name, case in cases.items():
            for strategy in STRATEGIES:
                marks = [] if strategy in QUICK else [pytest.mark.slow]
                id = f"{library}: {name}, {strategy}"
                yield pytest.param(case, strategy, id=id, marks=marks)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(("case", "strategy"), [*cells()])
def test_a_cell_is_equal_or_refused(case: Case, strategy: str) -> None:
    made = STRATEGIES[strategy]()
    refusal = case.refusal(strategy)
    if refusal is not None:
        with pytest.raises(refusal[0], match=refusal[1]):
            case.actual(made)
        return
    expected = case.expected(made.num_replicas_in_sync)
    assert_equal(case.actual(made), expected, case.rtol)
