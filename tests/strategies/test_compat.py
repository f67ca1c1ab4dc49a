"""Older spellings of tf.distribute, as scripts written for it have them."""

from typing import Any

import numpy as np
from tests.conftest import mirrored


def test_old_method_names_call_todays() -> None:
    strategy: Any = mirrored(2)
    result = strategy.experimental_run_v2(lambda x, y: x + y, (1.0,), {"y": 2.0})
    assert float(result) == 3.0
    rows = strategy.make_experimental_numpy_dataset(np.arange(3))
    assert list(rows) == [0, 1, 2]


def test_old_names_reach_what_a_subclass_overrides() -> None:
    class Counting(type(mirrored(1))):
        num_runs = 0

        def run(self, *args: Any, **kwargs: Any) -> Any:
            self.num_runs += 1
            return super().run(*args, **kwargs)

    strategy: Any = Counting(["cpu:0"])
    strategy.experimental_run_v2(lambda: 1.0)
    assert strategy.num_runs == 1
