"""A network of this machine's own: one namespace a worker, a bridge, and a rate.

Each worker's namespace has one interface, `eth0`, whose other end is on a bridge in a
namespace of its own. `tbf` limits both ends, which are both directions. Nothing of the
machine's own network is changed, and all namespaces are removed at the end.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Host", "LinkTest", "measure_link", "network", "require_tools"]

INTERFACE = "eth0"
_LIMIT_SECONDS = 60.0
# tbf passes this much at once. A large packet of the kernel (64 KB) has to fit, and at
# 10 Gbit/s what the link carries between two wake-ups of the timer.
_LEAST_BURST = 2**17
_BURST_SECONDS = 2e-4
_QUEUE = "20ms"
# What `ip netns exec` does not isolate: the host's name, by which Gloo finds its own
# address, and the file that says which address that is.
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_SEND = str(Path(__file__).parent / "network_send.py")


@dataclass(frozen=True)
class Host:
    """A worker's namespace.

    Attributes:
        namespace: Its name for `ip netns`.
        address: Its IPv4 address.
        prefix: What a command must begin with to run there.
    """

    namespace: str
    address: str
    prefix: tuple[str, ...]


@dataclass(frozen=True)
class LinkTest:
    """What two workers measure with plain sockets, sending to each other at once.

    Attributes:
        gbit: Bits per second and direction, in 1e9, without headers.
        round_trip_ms: Of one byte.
    """

    gbit: float
    round_trip_ms: float


def require_tools() -> None:
    """Raise `SystemExit` if this machine cannot make the network."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise SystemExit("This needs Linux and root, to make network namespaces.")
    for name in ("ip", "tc", "unshare", "mount", "hostname", "taskset"):
        if shutil.which(name) is None:
            raise SystemExit(f"This needs the command {name!r}; `ip`, `tc`: iproute2.")


@contextlib.contextmanager
def network(workers: int, gbit: float) -> Iterator[Sequence[Host]]:
    """Make namespaces for so many workers, linked at a rate, and remove them.

    Args:
        workers: How many.
        gbit: Rate of each link and direction, in Gbit/s.
    """
    prefix = f"replicax-{os.getpid()}"
    switch = f"{prefix}-switch"
    names = [f"{prefix}-w{rank}" for rank in range(workers)]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended by SIGTERM."))
    try:
        with tempfile.TemporaryDirectory(prefix="replicax-networks-") as folder:
            hosts = [
                _host(name, rank, Path(folder) / "hosts")
                for rank, name in enumerate(names)
            ]
            lines = [
                "127.0.0.1 localhost",
                *(f"{h.address} {h.prefix[-2]}" for h in hosts),
            ]
            (Path(folder) / "hosts").write_text("\n".join(lines) + "\n")
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for rank, host in enumerate(hosts):
                _connect(host, switch, f"port{rank}", gbit)
            yield hosts
    finally:
        for name in [*names, switch]:
            # Not `_run`: some may not have been made.
            subprocess.run(
                ["ip", "netns", "del", name],
                capture_output=True,
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        signal.signal(signal.SIGTERM, before)


def measure_link(hosts: Sequence[Host], gbit: float) -> LinkTest:
    """Send between the first two workers, both ways at once, for about a second."""
    size = max(16, round(gbit * 1e9 / 8 / 2**20))
    commands = [(hosts[0], "-"), (hosts[1], hosts[0].address)]
    processes = [
        subprocess.Popen(
            [*host.prefix, sys.executable, _SEND, peer, "7001", str(size)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for host, peer in commands
    ]
    try:
        texts = [p.communicate(timeout=_LIMIT_SECONDS)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    rates, trips = zip(*(map(float, text.split()) for text in texts), strict=True)
    return LinkTest(min(rates) * 8 / 1e9, trips[1] * 1e3)


def _host(namespace: str, rank: int, file: Path) -> Host:
    enter = ("ip", "netns", "exec", namespace, "unshare", "--uts", "--mount")
    shell = ("sh", "-c", _ENTER, "sh", f"worker{rank}", str(file))
    return Host(namespace, f"10.77.0.{rank + 1}", enter + shell)


def _connect(host: Host, switch: str, port: str, gbit: float) -> None:
    """Make a namespace and its link to the bridge."""
    inside = ("-n", host.namespace)
    _run("ip", "netns", "add", host.namespace)
    ends = ("type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
    _run("ip", "link", "add", port, "netns", switch, *ends)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", *inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    for name in ("lo", INTERFACE):
        _run("ip", *inside, "link", "set", name, "up")
    # Not what the machine uses, such as BBR, which paces by its own estimate of the
    # rate; a namespace may always choose Reno.
    congestion = "/proc/sys/net/ipv4/tcp_congestion_control"
    write = f"echo reno > {congestion}"
    _run("ip", "netns", "exec", host.namespace, "sh", "-c", write)
    burst = max(_LEAST_BURST, round(gbit * 1e9 / 8 * _BURST_SECONDS))
    limit = ("rate", f"{gbit}gbit", "burst", str(burst), "latency", _QUEUE)
    for namespace, device in ((host.namespace, INTERFACE), (switch, port)):
        _run(
            "tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit
        )


def _run(*command: str) -> None:
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}: {result.stderr.strip()}")
