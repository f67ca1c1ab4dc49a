"""Measurements after training: sums, without the time of program starts."""

import keras
import pytest
from tests.conftest import mirrored

from replicax.report import probes
from replicax.report.probes import start_seconds, sum_seconds


def variables(strategy):
    with strategy.scope():
        return [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]


@pytest.mark.parametrize(("times", "expected"), [([3.0, 1.0], 2.0), ([1.0, 3.0], 0.0)])
def test_a_sum_excludes_the_start_of_its_program(monkeypatch, times, expected) -> None:
    left = iter(times)

    def median(call, number):
        call()  # It runs.
        return next(left)

    monkeypatch.setattr(probes, "_median_seconds", median)
    strategy = mirrored(2)
    assert sum_seconds(strategy, variables(strategy)) == expected


def test_one_replica_sums_nothing() -> None:
    strategy = mirrored(1)
    assert sum_seconds(strategy, variables(strategy)) == 0.0


@pytest.mark.parametrize("number", [0, 3, 10_000])
def test_start_seconds_are_positive(number) -> None:
    assert start_seconds(number, mirrored(2).group) > 0
