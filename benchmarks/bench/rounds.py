"""One group: the peers of a case in a layout, measured in turns."""

import collections
import datetime
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.entries import Entry, Layout, entries_of
from bench.environments import versions_of
from bench.peers.cases import Case, case_of
from bench.processes import Peer, PeerError, close_all
from replicax._util.environment import usable_cores

__all__ = ["Turns", "measure"]

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
    turns = Turns(rounds, seconds, tell, required=entries[0].name)
    for start in range(starts):
        tell(f"  start {start + 1} of {starts}")
        peers: list[Peer] = []
        try:
            for entry in entries:
                python = pythons.get(entry.environment)
                if python is None:
                    reason = f"there is no environment {entry.environment}"
                    turns.left_out[entry.name] = reason
                elif entry.name not in turns.left_out:
                    peers.append(
                        Peer(entry, python, case, batch, limit_seconds, tiny=tiny)
                    )
            turns.measure_start(peers)
        finally:
            close_all(peers)
    return {
        "case": case,
        "title": work.title,
        "layout": layout,
        **_work_of(work, batch),
        "steps": turns.steps,
        "starts": starts,
        "rounds": rounds,
        "entries": turns.results,
        "left_out": turns.left_out,
        "machine": _machine(load, gpu),
        "versions": {name: versions_of(python) for name, python in pythons.items()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


class Turns:
    """Measurements of entries that take turns; an entry that fails is left out.

    Args:
        rounds: How often each is measured after a start.
        seconds: About how long the first entry is measured in a round.
        tell: Called with what happens.
        required: The entry to which all ratios are, if there is one: where it fails,
            nothing else is measured.

    Attributes:
        results: By entry's name, what `measure` writes as `entries`.
        left_out: Entries that were not measured or failed, with reasons.
        steps: Steps of each measurement, chosen once; 0 before.
    """

    def __init__(
        self,
        rounds: int,
        seconds: float,
        tell: Callable[[str], None],
        *,
        required: str | None = None,
    ) -> None:
        self.results: dict[str, _Result] = {}
        self.left_out: dict[str, str] = {}
        self.steps = 0
        self._rounds = rounds
        self._seconds = seconds
        self._tell = tell
        self._required = required

    def measure_start(self, peers: list[Peer]) -> None:
        """Measure processes that have been started; remove those that fail.

        Raises:
            PeerError: If the required entry fails.
        """
        self._each(peers, Peer.wait_until_ready)
        self._each(peers, self._first_steps)
        self._each(peers, self._warm_up)
        for i in range(self._rounds):
            self._tell(f"  round {i + 1} of {self._rounds}, {self.steps} steps each")
            # Each round begins with another one: whoever follows a heavy one loses.
            self._each(peers, self._add, first=i)

    def _each(
        self, peers: list[Peer], action: Callable[[Peer], None], first: int = 0
    ) -> None:
        """Run an action on all peers in turn, from the one at index `first`."""
        order = collections.deque(peers)
        order.rotate(-first)
        for peer in order:
            try:
                action(peer)
            except PeerError as error:
                name = peer.entry.name
                if name == self._required:
                    raise
                self.left_out[name] = str(error)
                self.results.pop(name, None)
                peers.remove(peer)
                peer.close()

    def _first_steps(self, peer: Peer) -> None:
        self._tell(f"  {peer.entry.name}: first steps")
        answers = [peer.train(1) for _ in range(_FIRST_STEPS)]
        result = self.results.setdefault(
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

    def _warm_up(self, peer: Peer) -> None:
        self.steps = self.steps or _steps_of(peer, self._seconds)
        peer.train(self.steps)

    def _add(self, peer: Peer) -> None:
        answer = peer.train(self.steps)
        result = self.results[peer.entry.name]
        result["seconds"].append(answer.seconds)
        result["cpu_seconds"].append(answer.cpu_seconds)
        result["memory_bytes"][-1] = answer.peak_bytes - peer.resident_bytes
        result["device_bytes"][-1] = answer.device_bytes


def _steps_of(peer: Peer, seconds: float) -> int:
    """Steps that take a peer about so long."""
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
    """The processor's name, with its family: cloud machines hide the model."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            parts = [line.partition(":") for line in stream]
    except OSError:
        parts = []
    values = {name.strip(): value.strip() for name, _, value in parts}
    if "model name" in values:
        numbers = [f"{x} {values[x]}" for x in ("cpu family", "model") if x in values]
        return ", ".join([values["model name"], *numbers])
    return platform.processor() or "unknown"
