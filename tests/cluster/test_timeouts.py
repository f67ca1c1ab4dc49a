"""rx.Timeouts: its values, and who takes it."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import replicax as rx

NAMES = ["startup", "step", "heartbeat", "shutdown", "server", "chief", "checkpoint"]
STRATEGIES: list[Callable[..., Any]] = [
    rx.MultiWorkerMirroredStrategy,
    rx.FullyShardedStrategy,
    rx.ModelParallelStrategy,
    rx.TPUStrategy,
    rx.ParameterServerStrategy,
]


def evaluate(**options: Any) -> rx.SidecarEvaluator:
    return rx.SidecarEvaluator(None, None, "nowhere", **options)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, "soon", None])
@pytest.mark.parametrize("name", NAMES)
def test_timeouts_are_positive_finite_numbers(name: str, value: object) -> None:
    message = f"Timeouts: {name} must be a positive, finite number of seconds; got "
    with pytest.raises(ValueError, match=re.escape(f"{message}{value!r}. Leave")):
        rx.Timeouts(**{name: value})


def test_numbers_of_any_kind() -> None:
    assert rx.Timeouts(step=1, startup=np.float32(0.5)) == rx.Timeouts(
        step=1.0, startup=0.5
    )


def test_fields_are_keyword_only_and_frozen() -> None:
    assert list(inspect.signature(rx.Timeouts).parameters) == NAMES
    with pytest.raises(TypeError, match="positional"):
        rx.Timeouts(60)
    with pytest.raises(AttributeError):
        rx.Timeouts().step = 60  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("call", [*STRATEGIES, evaluate])
def test_timeouts_of_another_type(call, monkeypatch) -> None:
    ports = {"worker": ["localhost:1"], "ps": ["localhost:2"]}
    if call is rx.ParameterServerStrategy:
        resolver = rx.cluster_resolver.SimpleClusterResolver(
            rx.ClusterSpec(ports), task_type="worker", task_id=0
        )
        monkeypatch.setattr("replicax.ps.strategy.default_resolver", lambda: resolver)
    with pytest.raises(TypeError, match=r"must be an? (rx\.)?Timeouts; got 60"):
        call(timeouts=60)


def test_the_communication_options_decide_about_the_step() -> None:
    seen = []

    class Mine(rx.MultiWorkerMirroredStrategy):
        def _join_workers(self, timeouts, gpus):
            seen.append(timeouts)
            return super()._join_workers(timeouts, gpus)

    options = rx.CommunicationOptions(timeout_seconds=7)
    Mine(communication_options=options, timeouts=rx.Timeouts(step=9, startup=8))
    assert seen == [rx.Timeouts(step=7, startup=8)]
