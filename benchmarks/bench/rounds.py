"""One group: the peers of a case in a layout, measured in turns."""

import datetime
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.entries import Entry, Layout, entries_of
from bench.environments import versions_of
from bench.peers.cases import Case, case_of
from bench.processes import Peer, PeerError
from replicax._util.environment import usable_cores

__all__ = ["measure"]

_Result = dict[str, Any]
_FIRST_STEPS = 3  # Done one by one; their losses are compared.


def measure(
    case: str,
    layout: Layout,
    pythons: Mapping[str, str],
    *,
    starts: int,
    rounds: int,
    seconds: float,
    limit_seconds: float,
    tell: Callable[[str], None],
    gpu: str | None = None,
    tiny: bool = False,
) -> dict[str, Any]:
    """Measure a group.

    Every entry's processes are started and stay; in each round each of them trains so
    many steps while the others wait. The steps before the first round, which compile,
    do not count. Then all are started again, since processes of one program differ.

    Args:
        case: The case's letter.
        layout: The layout.
        pythons: The Python of each environment that there is.
        starts: How often each is started.
        rounds: How often each is measured after a start.
        seconds: About how long the reference is measured in a round.
        limit_seconds: For each answer.
        tell: Called with what happens.
        gpu: Its name, which is written down.
        tiny: Take a small model, on the CPU, instead of a GPU's; tests do.

    Returns:
        What is written as JSON: `entries` by name with `seconds` of each round per
        step, `cpu_seconds`, `losses` of the first steps, and for each start
        `first_step_seconds`, `memory_bytes` and `device_bytes`; `left_out` with
        reasons; what a step does; and what ran where.

    Raises:
        PeerError: If the first of them, the reference, fails.
    """
    load = os.getloadavg()[0]
    work = case_of(case, tiny)
    entries = entries_of(case, layout)
    batch = work.batch * (_replicas(entries[0]) if work.batch_grows else 1)
    steps = None
    left_out: dict[str, str] = {}
    results: dict[str, _Result] = {}
    for start in range(starts):
        tell(f"  start {start + 1} of {starts}")
        peers: dict[str, Peer] = {}
        try:
            for entry in entries:
                python = pythons.get(entry.environment)
                if python is None:
                    reason = f"there is no environment {entry.environment}"
                    left_out[entry.name] = reason
                elif entry.name not in left_out:
                    peers[entry.name] = Peer(
                        entry, python, case, batch, limit_seconds, tiny=tiny
                    )
            steps = _measure_start(
                peers, left_out, results, rounds, seconds, steps, tell
            )
        finally:
            for peer in peers.values():
                peer.finish()
            for peer in peers.values():
                peer.close()
    return {
        "case": case,
        "title": work.title,
        "layout": layout,
        **_work_of(work, batch),
        "steps": steps,
        "starts": starts,
        "rounds": rounds,
        "entries": {e.name: results[e.name] for e in entries if e.name not in left_out},
        "left_out": left_out,
        "machine": _machine(load, gpu),
        "versions": {name: versions_of(python) for name, python in pythons.items()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _measure_start(
    peers: dict[str, Peer],
    left_out: dict[str, str],
    results: dict[str, _Result],
    rounds: int,
    seconds: float,
    steps: int | None,
    tell: Callable[[str], None],
) -> int:
    """Measure processes that have been started; the steps of a round, chosen once."""
    reference = next(iter(peers))
    for name in list(peers):
        _try(peers, left_out, name, Peer.wait_until_ready)
    for name in list(peers):
        tell(f"  {name}: first steps")
        _try(peers, left_out, name, lambda p: _first_steps(p, results))
    _require(reference, left_out)
    steps = steps or _steps_of(peers[reference], seconds)
    for name in list(peers):
        _try(peers, left_out, name, lambda p: p.train(steps))
    for i in range(rounds):
        tell(f"  round {i + 1} of {rounds}, {steps} steps each")
        # Each round begins with another one: whoever follows a heavy one loses.
        names = list(peers)
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            _try(peers, left_out, name, lambda p: _add(p, steps, results))
        _require(reference, left_out)
    return steps


def _require(reference: str, left_out: Mapping[str, str]) -> None:
    """All ratios are to it."""
    if reference in left_out:
        raise PeerError(left_out[reference])


def _try(
    peers: dict[str, Peer],
    left_out: dict[str, str],
    name: str,
    action: Callable[[Peer], Any],
) -> None:
    """Leave a peer out, with its reason, if it fails; others go on."""
    try:
        action(peers[name])
    except PeerError as error:
        left_out[name] = str(error)
        peers.pop(name).close()


def _first_steps(peer: Peer, results: dict[str, _Result]) -> None:
    answers = [peer.train(1) for _ in range(_FIRST_STEPS)]
    result = results.setdefault(
        peer.entry.name,
        {
            "losses": [answer.loss for answer in answers],
            "first_step_seconds": [],
            "seconds": [],
            "cpu_seconds": [],
            "memory_bytes": [],
            "device_bytes": [],
        },
    )
    result["first_step_seconds"].append(answers[0].seconds)
    for key in ("memory_bytes", "device_bytes"):
        result[key].append(0.0)


def _add(peer: Peer, steps: int, results: dict[str, _Result]) -> None:
    answer = peer.train(steps)
    result = results[peer.entry.name]
    result["seconds"].append(answer.seconds)
    result["cpu_seconds"].append(answer.cpu_seconds)
    result["memory_bytes"][-1] = answer.peak_bytes - peer.resident_bytes
    result["device_bytes"][-1] = answer.device_bytes


def _steps_of(peer: Peer, seconds: float) -> int:
    """Steps that take the reference about so long."""
    once = statistics.median(peer.train(1).seconds for _ in range(3))
    if peer.entry.accelerated:  # Some do 8 in one call.
        return 8 * max(1, round(seconds / once / 8))
    if once < seconds / 64:  # One alone is mostly the begin and the end.
        once = peer.train(64).seconds
        return 32 * max(1, round(seconds / once / 32))
    return max(4, round(seconds / once))  # Calls of `fit` have a begin and an end.


def _replicas(entry: Entry) -> int:
    return entry.processes * entry.devices


def _work_of(case: Case, batch: int) -> dict[str, Any]:
    """What a step of the reference does."""
    return {
        "batch": batch,
        "dtype": case.dtype,
        "unit": case.unit,
        "units": case.units(batch),
        "flops": case.flops(batch),
    }


def _machine(load: float, gpu: str | None) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "processor": _processor(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_at_start": round(load, 2),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
