"""What a program of the seeds is: its blocks, how it is run, and what it must print."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Machines", "Planned", "Process", "Program", "Tasks"]


@dataclass(frozen=True, slots=True)
class Process:
    """One process with logical CPU devices."""

    num_devices: int = 2


@dataclass(frozen=True, slots=True)
class Tasks:
    """`replicax run`: the tasks of a cluster, each with its TF_CONFIG."""

    workers: int = 2
    ps: int = 0


@dataclass(frozen=True, slots=True)
class Machines:
    """A process for each machine, whose script sets TF_CONFIG itself.

    Attributes:
        addresses: Each task and the address that the script has for it. A free port of
            this machine takes its place, and each machine's script gets its own task.
    """

    addresses: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Planned:
    """`replicax plan`: compiled for a TPU slice, and not run."""

    topology: str = "v5e:2x4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Blocks that make a program, and what is to be seen when it runs.

    Attributes:
        name: Unique; begins with the seed's number.
        title: The section of the seed.
        strategy: What the text calls it.
        parts: Files in `blocks/`, in order.
        run: How it is started.
        names: What codas call things, and what the blocks call them.
        replaced: Texts of the blocks that cannot be used on a CPU, and what stands for
            them.
        environment: What the preludes read, such as numbers of steps.
        data: Folder of photos, or "" for data that come with scikit-learn.
        replicas: How many each process says there are.
        falls: Whether the last loss must be smaller than the first.
        prints: Patterns that must be found in the output.
        at_least: Names that are printed with a number, and the least one.
        error: What the program ends with; "" where it succeeds.
        is_slow: Whether it runs with the slow tests only, as it takes more than a few
            seconds or others run most of its lines.
        limit_s: When it is ended.
    """

    name: str
    title: str
    strategy: str
    parts: tuple[str, ...]
    run: Process | Tasks | Machines | Planned = field(default_factory=Process)
    names: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    data: str = ""
    replicas: int | None = None
    falls: bool = False
    prints: tuple[str, ...] = ()
    at_least: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    is_slow: bool = False
    limit_s: float = 100

    @property
    def seed(self) -> str:
        """The seed's number, such as "002"."""
        return self.name[:3]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The parts that are the author's."""
        return tuple(part for part in self.parts if "." not in part)
