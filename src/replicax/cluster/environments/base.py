"""The base class of launchers, and a process' place among the others."""

import os
import re
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from replicax.cluster.resolvers import ClusterResolver, SimpleClusterResolver
from replicax.cluster.spec import ClusterSpec
from replicax.errors import ClusterConfigError

__all__ = ["ADDRESS", "ALONE", "ClusterEnvironment", "IncompleteError", "Membership"]

ADDRESS = "JAX_COORDINATOR_ADDRESS"
ALONE = "To train in this process alone, pass cluster_resolver='alone'."

# JAX's range for coordinators; Linux chooses its ephemeral ports below it.
_FIRST_PORT, _NUM_PORTS = 61440, 4096


@dataclass(frozen=True, kw_only=True)
class Membership:
    """This process' place among the processes that a launcher has started.

    The launcher gives an address for each process, in `resolver`, or only the address
    `"host:port"` of process 0, the `coordinator`. `local` is this process' index on its
    machine and the number of processes there, if the launcher leaves the choice of
    devices to the processes.
    """

    index: int | None = 0  # From zero; None: this process does not train.
    count: int = 1  # Number of processes that train together.
    resolver: ClusterResolver | None = None
    coordinator: str = ""
    local: tuple[int, int] | None = None
    num_tasks: int = 0  # All of the launcher's processes; 0: `count`.


class IncompleteError(ClusterConfigError):
    """A launcher's variables are incomplete; `count` processes, 0: unknown."""

    def __init__(self, problem: str, count: int = 0) -> None:
        super().__init__(f"{problem} {ALONE}", problem)
        self.count = count


class ClusterEnvironment(ABC):
    """A launcher, which sets environment variables in each process.

    The base class reads four variables: this process' index, the number of processes,
    and host and port of process 0, the coordinator. Subclasses set the variables'
    names, or override `membership`.

    Attributes:
        name: The launcher's name, an argument of strategies.
        index: Name of the variable with this process' index.
        size: Name of the variable with the number of processes.
        host: Name of the variable with the coordinator's host, or its whole address.
        port: Name of the variable with the coordinator's port; empty: `host` has both.
        local: Names of the variables with the index and the number of processes on
            this machine; the first pair that is set counts.
        replaces: Outer launchers, whose variables count this launcher's daemons.
    """

    name: ClassVar[str]
    index: ClassVar[str] = ""
    size: ClassVar[str] = ""
    host: ClassVar[str] = ""
    port: ClassVar[str] = ""
    local: ClassVar[tuple[tuple[str, str], ...]] = ()
    replaces: ClassVar[tuple[str, ...]] = ()

    def detect(self) -> bool:
        """Whether a variable of this launcher is set."""
        address = "" if self.port else self.host
        return any(os.environ.get(x) for x in (self.index, self.size, address))

    def membership(self) -> Membership:
        """Return this process' place among the launcher's processes.

        Raises:
            IncompleteError: If variables are missing.
            ClusterConfigError: If variables are malformed.
        """
        index, count = self.index_and_count()
        if count == 1:
            return Membership()
        return Membership(
            index=index,
            count=count,
            coordinator=os.environ.get(ADDRESS) or self.address(count),
            local=self.local_place(),
        )

    def coordinator(self, place: Membership) -> str:
        """Return the address that process 0 listens on; may ask the launcher."""
        return place.coordinator

    def index_and_count(self) -> tuple[int, int]:
        """Read this process' index and the number of processes."""
        count = self.number(self.size, 1) if os.environ.get(self.size) else 0
        self.require(self.index, self.size, count=count)
        return self.number(self.index, 0, count - 1), count

    def address(self, count: int) -> str:
        """Read the coordinator's address; `JAX_COORDINATOR_ADDRESS` overrides it."""
        names = [name for name in (self.host, self.port) if name]
        self.require(*names, count=count)
        if not self.port:
            return os.environ[self.host]
        return f"{bracketed(os.environ[self.host])}:{self.number(self.port, 1, 65535)}"

    def local_place(self) -> tuple[int, int] | None:
        """Read the index and the number of processes on this machine; None: not set."""
        for index, size in self.local:
            if os.environ.get(size):
                count = self.number(size, 1)
                return self.number(index, 0, count - 1), count
        return None

    def require(self, *names: str, count: int = 0, remedy: str = "") -> None:
        """Raise an `IncompleteError` unless all variables are set."""
        missing = [name for name in names if not os.environ.get(name)]
        if missing:
            them, are = " and ".join(missing), "is" if len(missing) == 1 else "are"
            remedy = remedy or f"Set {them} in every process."
            problem = f"{self.described()}, but {them} {are} not set. {remedy}"
            raise IncompleteError(f"{self.name}: {problem}", count)

    def number(self, name: str, low: int, high: int = 10**6) -> int:
        """Read a number from `low` to `high`."""
        text = os.environ.get(name, "")
        if re.fullmatch(r"[0-9]{1,9}", text) and low <= int(text) <= high:
            return int(text)
        raise ClusterConfigError(
            f"{self.name}: {name} must be a number from {low} to {high}; got "
            f"{self.described()}. Correct the variable. {ALONE}"
        )

    def described(self) -> str:
        """The launcher's variables with their values, for messages."""
        names = dict.fromkeys((self.index, self.size, self.host, self.port))
        values = [f"{x}={os.environ[x]!r}" for x in names if os.environ.get(x)]
        return ", ".join(values) or f"{self.index} and {self.size} not set"

    def workers(self, index: int, addresses: list[str]) -> Membership:
        """Make the membership of process `index` from the addresses of all."""
        resolver = SimpleClusterResolver(
            ClusterSpec({"worker": addresses}),
            addresses[index],
            task_type="worker",
            task_id=index,
            environment=self.name,
        )
        return Membership(index=index, count=len(addresses), resolver=resolver)


def default_port(seed: int = 0) -> int:
    """Return `JAX_COORDINATOR_PORT`, or else a port derived from the job's number."""
    text = os.environ.get("JAX_COORDINATOR_PORT") or str(
        _FIRST_PORT + seed % _NUM_PORTS
    )
    if re.fullmatch("[0-9]{1,5}", text):
        return int(text)
    raise ClusterConfigError(
        f"JAX_COORDINATOR_PORT must be a port number; got {text!r}. Correct it."
    )


def bracketed(host: str) -> str:
    """Put an IPv6 address into brackets, so that a port can follow."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
