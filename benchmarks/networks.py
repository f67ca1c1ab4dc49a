"""Step time between workers on a slow network, over what the network allows.

Workers are processes in network namespaces of this machine, linked at a rate
(`network_namespaces.py`). All entries of a group take turns within each round. The
limit of a step is the larger of two times: the same step without communication, which
the same processes do without joining each other, and the time that a ring all-reduce
needs to send the gradients. It needs Linux, root, and iproute2; peers are given as
interpreters, others are left out.

    python benchmarks/networks.py --python torch=PATH --python tensorflow=PATH
    python benchmarks/networks.py --workers 2 --rates 1 --cases a --starts 1 --rounds 3

With `--output FILE --resume`, what FILE has already is not measured again.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "bench" / "peers"))
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax_models

from bench.entries import Entry
from bench.environments import named_pythons
from bench.peers.cases import CASES
from bench.processes import Peer, close_all
from bench.rounds import Turns
from network_namespaces import INTERFACE, Host, measure_link, network, require_tools
from network_tables import draw, tables

_JAX = Entry("bare JAX", "jax_peer.py", "here")
_FIT = Entry("replicax fit", "replicax_peer.py", "here", loop="fit")
_TORCH = Entry("torch DDP", "torch_peer.py", "torch")
_TF = Entry("TF run, tf_keras", "tf_peer.py", "tensorflow", keras=2)


@dataclass(frozen=True)
class _Way:
    """An entry on a network.

    Attributes:
        entry: What runs.
        compression: "bfloat16", "float16" or "".
        is_joined: Whether the workers communicate.
    """

    entry: Entry
    compression: str = ""
    is_joined: bool = True

    @property
    def name(self) -> str:
        suffix = f", {self.compression}" if self.compression else ""
        return self.entry.name + suffix + ("" if self.is_joined else ", alone")


def ways_of(workers: int, only: str) -> list[_Way]:
    """What is compared; each library also alone, which is its limit."""
    sharded = replace(_FIT, name=f"{_FIT.name}, shard_update", shard_update=True)
    ways = [
        _Way(_JAX),
        _Way(_FIT),
        _Way(_FIT, compression="float16"),
        _Way(sharded),
        _Way(_TORCH),
        _Way(_TORCH, compression="bfloat16"),
        _Way(_TF),
        *(_Way(x, is_joined=False) for x in (_JAX, _FIT, _TORCH, _TF)),
    ]
    cores = max(1, len(os.sched_getaffinity(0)) // workers)
    return [
        replace(way, entry=replace(way.entry, processes=workers, cores=cores))
        for way in ways
        if any(part in way.entry.name for part in only.split(","))
    ]


def gradient_bytes(case: str) -> int:
    """The bytes of a case's gradients in float32."""
    params, _ = jax_models.first_weights(CASES[case])
    return 4 * sum(x.size for x in params.values())


def measure(
    case: str,
    hosts: Sequence[Host],
    pythons: Mapping[str, str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Start all entries of a case, one process on each host; measure them in turns.

    Returns:
        What is written as JSON: `steps`; `entries` by name with `seconds` of a step for
        each round, `losses` of the first steps, `compression`, and the entry `alone`
        that is the limit; and `left_out` with reasons.
    """
    ways = ways_of(len(hosts), options.only)
    turns = Turns(options.rounds, options.seconds, _tell)
    peers: list[Peer] = []
    try:
        for way in ways:
            python = pythons.get(way.entry.environment)
            if python is None:
                reason = f"no --python {way.entry.environment}=PATH"
                turns.left_out[way.name] = reason
            else:
                peers.append(_start(way, case, hosts, python, options.limit_seconds))
        turns.measure_start(peers)
    finally:
        close_all(peers)
    if not turns.results:
        raise SystemExit(f"No entry could be measured: {turns.left_out}")
    entries = {
        way.name: {
            "compression": way.compression,
            "alone": _alone(way) if way.is_joined else "",
            "seconds": turns.results[way.name]["seconds"],
            "losses": turns.results[way.name]["losses"],
        }
        for way in ways
        if way.name in turns.results
    }
    return {"steps": turns.steps, "entries": entries, "left_out": turns.left_out}


def _start(
    way: _Way, case: str, hosts: Sequence[Host], python: str, limit_seconds: float
) -> Peer:
    batch = CASES[case].batch
    return Peer(
        replace(way.entry, name=way.name),
        python,
        case,
        batch if way.is_joined else batch // len(hosts),
        limit_seconds,
        hosts=hosts,
        variables={
            "BENCH_COMPRESSION": way.compression,
            "GLOO_SOCKET_IFNAME": INTERFACE,  # torch's.
        },
        is_joined=way.is_joined,
    )


def _alone(way: _Way) -> str:
    library = way.entry.name.removesuffix(", shard_update")
    return f"{library}, alone"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 4])
    add("--rates", type=float, nargs="+", default=[1, 10], help="Gbit/s of each link")
    add("--cases", nargs="+", default=["a", "c", "e"], choices=list(CASES))
    add("--starts", type=int, default=3, help="times that all processes are started")
    add("--rounds", type=int, default=5, help="timings of each entry in each start")
    add("--seconds", type=float, default=2.0, help="about how long a timing takes")
    add("--only", default="", help="entries whose names have one of these, by commas")
    add("--python", action="append", default=[], metavar="NAME=PATH")
    add("--limit-seconds", type=float, default=300.0, help="for each answer of a peer")
    add("--output", type=Path, help="a JSON file; it is written after each start")
    add("--resume", action="store_true", help="keep what --output has, and add to it")
    add("--picture", type=Path, help="a PNG of the steps; needs matplotlib")
    return parser.parse_args()


def main() -> None:
    options = _options()
    require_tools()
    try:
        pythons = {"here": sys.executable, **named_pythons(options.python)}
    except ValueError as error:
        raise SystemExit(str(error)) from error
    groups: list[dict[str, Any]] = []
    if options.resume and options.output and options.output.exists():
        groups = json.loads(options.output.read_text())
    done = {(g["case"], g["workers"], g["gbit"], g["start"]) for g in groups}
    wanted = [
        (case, workers, gbit, start)
        for start in range(options.starts)
        for workers in options.workers
        for gbit in options.rates
        for case in options.cases
        if (case, workers, gbit, start) not in done
    ]
    begin = time.monotonic()
    for number, (case, workers, gbit, start) in enumerate(wanted):
        _tell(f"({case}) {CASES[case].title}, {workers} workers, {gbit:g} Gbit/s")
        with network(workers, gbit) as hosts:
            link = measure_link(hosts, gbit)
            _tell(f"  link: {link.gbit:.2f} Gbit/s, {link.round_trip_ms:.3f} ms")
            group = measure(case, hosts, pythons, options)
        for name, reason in group["left_out"].items():
            _tell(f"  {name} is left out: {reason}")
        size = gradient_bytes(case)
        groups.append(
            {
                "case": case,
                "title": CASES[case].title,
                "workers": workers,
                "gbit": gbit,
                "start": start,
                "link_gbit": link.gbit,
                "round_trip_ms": link.round_trip_ms,
                "gradient_bytes": size,
                "wire_seconds": size * 8 * 2 * (workers - 1) / workers / (gbit * 1e9),
                "cores": len(os.sched_getaffinity(0)),
                **group,
            }
        )
        if options.output:
            options.output.write_text(json.dumps(groups, indent=1) + "\n")
        each = (time.monotonic() - begin) / (number + 1)
        rest = each * (len(wanted) - number - 1)
        _tell(f"  {each:.0f} s a group; about {rest / 60:.0f} more minutes")
    print(tables(groups))
    if options.picture:
        draw(groups, options.picture)


if __name__ == "__main__":
    main()
