"""The line at the end of training: the measurements, and one thing to change."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax.report.diagnosis import (
    FEWEST_EXECUTIONS,
    Measurements,
    diagnose,
    shares,
    summary,
)
from replicax.report.worker import ReportedWorker

SHARE = st.floats(0, 1)
MEASURED = st.builds(
    Measurements,
    executions=st.integers(0, 10**6),
    step_s=st.one_of(st.floats(1e-9, 1e4), st.just(math.nan)),
    examples_per_s=st.floats(0, 1e9),
    batch=st.floats(0, 1e6),
    num_replicas=st.integers(1, 4096),
    kind=st.sampled_from(["alone", "replicas", "servers", "central"]),
    input=SHARE,
    communication=st.none() | SHARE,
    start=st.none() | SHARE,
    steps_per_execution=st.integers(1, 64),
    can_compress=st.booleans(),
    input_worker=st.sampled_from(["", "worker:1"]),
)
USUAL = Measurements(
    executions=500,
    step_s=0.01,
    examples_per_s=6400.0,
    batch=64,
    num_replicas=8,
    kind="replicas",
    communication=0.1,
    start=0.01,
)


@given(MEASURED)
def test_shares_sum_to_one(measured) -> None:
    parts = shares(measured)
    assert all(s is None or -1e-9 <= s <= 1 for s in parts.values())
    assert sum(s or 0 for s in parts.values()) == pytest.approx(1)
    assert (parts["communication"] is None) == (measured.communication is None)


@given(MEASURED)
def test_there_is_one_line_of_advice(measured) -> None:
    text = diagnose(measured)
    assert ":" in text
    assert len(summary(measured).splitlines()) == 1
    assert summary(measured).endswith(text)


@given(MEASURED)
def test_few_steps_give_no_diagnosis(measured) -> None:
    few = dataclasses.replace(measured, executions=FEWEST_EXECUTIONS - 1)
    assert diagnose(few).startswith("too few steps")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["compute-bound: nothing to change first"]),
        ({"input": 0.31}, ["input-bound", "PyDataset(workers=...)"]),
        ({"input": 0.5, "input_worker": "worker:1"}, ["input-bound on worker:1"]),
        (
            {"start": 0.5},
            ["batch of 64 too small for 8 replicas (8 examples each)", "batch_size"],
        ),
        ({"start": 0.5}, ["steps_per_execution=16"]),
        ({"communication": 0.5}, ["communication-bound", "CommunicationOptions("]),
        (
            {"communication": 0.5, "kind": "servers"},
            ['ParameterServerStrategy(compression="bfloat16")'],
        ),
    ],
)
def test_rules(changes, words) -> None:
    text = diagnose(dataclasses.replace(USUAL, **changes))
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"communication": 0.5, "can_compress": False}, "compression"),
        ({"communication": 0.5, "kind": "central"}, "compression"),
        ({"start": 0.5, "steps_per_execution": 16}, "steps_per_execution"),
        ({"start": 0.5, "kind": "central"}, "steps_per_execution"),
        ({"start": 0.5, "kind": "alone", "num_replicas": 1}, "replicas"),
    ],
)
def test_advice_that_does_not_apply_is_left_out(changes, word) -> None:
    assert word not in diagnose(dataclasses.replace(USUAL, **changes))


def test_compression_is_not_advised_between_cpus() -> None:
    assert not ReportedWorker(rx.MirroredStrategy()).can_compress


def test_the_line_has_the_figures() -> None:
    assert summary(USUAL) == (
        "6,400 examples/s, 10 ms a step (input 0%, start 1%, communication 10%, "
        "compute 89%); compute-bound: nothing to change first"
    )
    unknown = dataclasses.replace(USUAL, communication=None)
    assert "communication not measured" in summary(unknown)
