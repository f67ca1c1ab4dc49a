"""Diagnoses a training in one line: its speed, and the first thing to change."""

import dataclasses
import math
from typing import Literal

from replicax._util.units import seconds

__all__ = ["FEWEST_EXECUTIONS", "Measurements", "diagnose", "shares", "summary"]

FEWEST_EXECUTIONS = 10
"""Fewer timed executions are too noisy for a diagnosis."""

_LARGE = 0.30  # A share of a step's time that is worth a change.

Kind = Literal["alone", "replicas", "servers", "central"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """Measurements of a training; NaN or None: not measured.

    Shares are of a step's time, from 0 to 1. `kind` is the place of the variables: the
    only replica, each replica, parameter servers, or one device of the machine.
    """

    executions: int  # Of programs, except those that compiled.
    step_s: float
    examples_per_s: float  # Of all workers.
    batch: float  # Examples of a step, over all of its replicas.
    num_replicas: int = 1
    kind: Kind = "alone"
    input: float = 0.0  # Share of waiting for input, on the worker that waits most.
    communication: float | None = None  # Share of all-reduces or servers' replies.
    start: float | None = None  # Share of starting programs.
    steps_per_execution: int = 1
    can_compress: bool = True  # Whether bfloat16 would halve the bytes that are sent.
    input_worker: str = ""  # The worker that waits most; empty: the only one.


def shares(measured: Measurements) -> dict[str, float | None]:
    """Divide a step's time into shares that sum to 1; None where not measured.

    Compute is the rest. Communication and starts are measured after the training, and
    limited to the time that the devices did not wait for input.
    """
    rest = 1.0 - measured.input
    result: dict[str, float | None] = {"input": measured.input}
    for name in ("start", "communication"):
        share = getattr(measured, name)
        result[name] = None if share is None else min(share, rest)
        rest -= result[name] or 0.0
    return result | {"compute": max(0.0, rest)}


def diagnose(measured: Measurements) -> str:
    """Name the bottleneck and the first thing to change, in one line.

    Example:
        >>> m = Measurements(executions=90, step_s=0.01, examples_per_s=6400, batch=64)
        >>> diagnose(m)
        'compute-bound: nothing to change first'
        >>> diagnose(dataclasses.replace(m, input=0.6)).split(":")[0]
        'input-bound'
    """
    is_timed = math.isfinite(measured.step_s) and measured.step_s > 0
    if measured.executions < FEWEST_EXECUTIONS or not is_timed:
        return (
            "too few steps to say what limits them "
            f"({measured.executions} were timed after compiling, at least "
            f"{FEWEST_EXECUTIONS} are needed): train longer"
        )
    share_of = {name: share or 0.0 for name, share in shares(measured).items()}
    if share_of["input"] > _LARGE:
        where = f" on {measured.input_worker}" if measured.input_worker else ""
        more = ", or use more workers" if measured.kind == "servers" else ""
        return (
            f"input-bound{where}: make batches in more threads or processes "
            "(PyDataset(workers=...), Grain's mp_prefetch), or keep prepared ones in "
            f"memory{more}"
        )
    if share_of["start"] > _LARGE:
        return _small_batch(measured)
    if share_of["communication"] > _LARGE:
        return _slow_communication(measured)
    return "compute-bound: nothing to change first"


def summary(measured: Measurements) -> str:
    """Format the line to print: speed, shares and `diagnose`."""
    parts = ", ".join(
        f"{name} {share:.0%}" if share is not None else f"{name} not measured"
        for name, share in shares(measured).items()
    )
    if not math.isfinite(measured.step_s):
        return diagnose(measured)
    rate = measured.examples_per_s
    speed = f"{rate:,.0f} examples/s" if rate >= 10 else f"{rate:.2g} examples/s"
    return f"{speed}, {seconds(measured.step_s)} a step ({parts}); {diagnose(measured)}"


def _small_batch(measured: Measurements) -> str:
    replicas = measured.num_replicas
    per_replica = measured.batch / replicas
    what = f"batch of {measured.batch:,.0f} too small"
    if replicas > 1:
        what += f" for {replicas} replicas ({per_replica:,.3g} examples each)"
    advice = "use a larger batch_size"
    if measured.steps_per_execution == 1 and measured.kind in ("alone", "replicas"):
        advice += " or compile(steps_per_execution=16)"
    return f"{what}: {advice}, since starting programs takes much of a step"


def _slow_communication(measured: Measurements) -> str:
    advice = "use a larger batch_size, so that an epoch sums gradients less often"
    if measured.kind == "servers":
        advice = "use a larger batch_size, so that an epoch has fewer exchanges"
        if measured.can_compress:
            advice += ', or ParameterServerStrategy(compression="bfloat16")'
    elif measured.kind == "replicas" and measured.can_compress:
        advice += ', or CommunicationOptions(compression="bfloat16")'
    return f"communication-bound: {advice}"
