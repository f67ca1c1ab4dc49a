"""The arguments of a `model_fn` and an `input_fn`, also decorated or partial ones."""

import functools
from typing import Any

import pytest

from replicax_estimator.spec import EstimatorSpec, ModeKeys
from replicax_estimator.user_functions import ModelFunction, accepted_arguments


def anyhow(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("decorated", [lambda fn: fn, anyhow, functools.partial])
def test_model_fn_gets_the_arguments_of_its_signature(decorated: Any) -> None:
    seen = {}

    def model_fn(features: Any, labels: Any, mode: Any) -> EstimatorSpec:
        seen.update(features=features, labels=labels)
        return EstimatorSpec(mode=mode, predictions={"x": features})

    fn = ModelFunction(decorated(model_fn), {}, None)
    fn(1, 2, ModeKeys.PREDICT)
    assert seen == {"features": 1, "labels": 2}
    with pytest.raises(ValueError, match="no argument `params`"):
        ModelFunction(decorated(model_fn), {"units": 8}, None)


def test_input_fn_gets_the_arguments_of_its_signature() -> None:
    def input_fn(params: Any, input_context: Any = None) -> None:
        pass

    available = ["mode", "params", "input_context"]
    for fn in (input_fn, anyhow(input_fn)):
        accepted = accepted_arguments(fn, "input_fn", available)
        assert accepted == {"params", "input_context"}
        partial = functools.partial(fn, params=3)
        assert accepted_arguments(partial, "input_fn", available) == {"input_context"}
