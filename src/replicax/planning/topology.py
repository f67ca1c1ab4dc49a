"""Resolves names such as `"v5e:16x16"` or `"cpu:8"` to devices and their rates."""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from replicax.engine.devices import Device
from replicax.errors import DeviceError
from replicax.planning import compiler
from replicax.planning.rates import CHIPS, Chip, Rates, measure_rates

__all__ = [
    "DeviceTopology",
    "check_topology",
    "find_topology",
    "needs_libtpu",
    "num_cpu_devices",
]

_LOCAL = re.compile(r"(cpu|gpu):(\d+)")
_SLICE = re.compile(r"(\w+):(\d+(?:x\d+)*)")

# libtpu asks for the place of the machine in a slice, which it is not in, and complains
# about the answer. It reads these; what is set already stays.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    # Its lock is for those who take the chips; here are none to take.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTopology:
    """Devices to plan for, one replica each.

    Attributes:
        devices: In the replicas' order. Those of a chip that is not here describe it
            only: programs can be compiled for them, not run.
        chip: The kind of chip; None for devices of this machine.
        shape: The grid of chips of one slice; empty for devices of this machine.
    """

    name: str
    devices: tuple[Device, ...]
    rates: Rates
    chip: Chip | None = None
    shape: tuple[int, ...] = ()
    num_slices: int = 1

    @property
    def num_hosts(self) -> int:
        """Number of machines that hold the devices."""
        return len({d.process_index for d in self.devices})

    def spans_hosts(self, group: Sequence[int]) -> bool:
        """Whether the devices at these positions are on several machines."""
        return len({self.devices[i].process_index for i in group}) > 1

    def num_slices_of(self, group: Sequence[int]) -> int:
        """How many slices the devices at these positions are in."""
        if self.num_slices == 1:
            return 1
        return len({self.devices[i].slice_index for i in group})

    def extent(self, group: Sequence[int]) -> tuple[int, ...]:
        """The box of chips, in one slice, that holds the devices at these positions."""
        if self.chip is None:
            return ()
        coords = [self.devices[i].coords for i in group]
        spans = [len(set(axis)) for axis in zip(*coords, strict=True)]
        return tuple(spans[: self.chip.num_dims])


def find_topology(name: str, num_slices: int = 1) -> DeviceTopology:
    """The devices of a topology."""
    check_topology(name, num_slices)
    if local := _LOCAL.fullmatch(name):
        return _local(name, local[1], int(local[2]))
    chip, shape = _parsed(name)
    return DeviceTopology(
        name=name if num_slices == 1 else f"{num_slices} x {name}",
        devices=_described_devices(name, chip, shape, num_slices),
        rates=chip.rates,
        chip=chip,
        shape=shape,
        num_slices=num_slices,
    )


def check_topology(name: str, num_slices: int = 1) -> None:
    """Refuse a topology that is not known, without looking for its devices."""
    if not isinstance(num_slices, int) or num_slices < 1:
        raise DeviceError(f"plan: num_slices must be at least 1; got {num_slices!r}.")
    if not _LOCAL.fullmatch(name):
        _parsed(name)
    elif num_slices > 1:
        raise DeviceError(
            f"plan: num_slices={num_slices} needs TPU slices; {name!r} names devices "
            "of this machine."
        )


def needs_libtpu(name: str) -> bool:
    """Whether a topology is one of TPUs."""
    return _LOCAL.fullmatch(name) is None


def num_cpu_devices(name: str) -> int | None:
    """How many CPU devices `"cpu:8"` asks for; None for other topologies."""
    match = _LOCAL.fullmatch(name)
    return int(match[2]) if match and match[1] == "cpu" else None


def _parsed(name: str) -> tuple[Chip, tuple[int, ...]]:
    match = _SLICE.fullmatch(name)
    chip = CHIPS.get(match[1]) if match else None
    if match is None or chip is None:
        raise DeviceError(f"plan: unknown topology {name!r}. {_known()}")
    shape = tuple(int(n) for n in match[2].split("x"))
    if not chip.has_shape(shape):
        raise DeviceError(f"plan: there is no slice {name!r}. {_known(chip)}")
    return chip, shape


def _known(chip: Chip | None = None) -> str:
    chips = CHIPS.values() if chip is None else [chip]
    names = [
        ", ".join(f"{c.name}:{'x'.join(map(str, shape))}" for shape in c.shapes)
        + (" and boxes of such cubes" if c.num_dims == 3 else "")
        for c in chips
    ]
    local = " Devices of this machine: cpu:N, gpu:N." if chip is None else ""
    return f"Known: {'; '.join(names)}.{local}"


def _described_devices(
    name: str, chip: Chip, shape: tuple[int, ...], num_slices: int
) -> tuple[Device, ...]:
    library = compiler.find()
    if library is None:
        raise ImportError(
            f"plan: compiling for {name} needs the TPU compiler, libtpu, which is not "
            f"here. {compiler.how_to_install()} `replicax plan` does so by itself."
        )
    from jax.experimental import topologies

    options: dict[str, str | int] = dict(chip.options)
    if num_slices > 1:
        options["num_slices"] = num_slices
    with _environment(library):
        try:
            found = topologies.get_topology_desc(name, "tpu", **options)
        except jax.errors.JaxRuntimeError as error:
            raise DeviceError(
                f"plan: the installed libtpu does not know {name!r}: {error} "
                f"{_known(chip)}"
            ) from error
    devices = sorted(found.devices, key=lambda d: (d.process_index, d.id))
    if len(devices) != math.prod(shape) * num_slices:
        raise DeviceError(
            f"plan: libtpu describes {name!r} as {len(devices)} devices, not as one "
            "for each chip. Use another topology or another version of libtpu."
        )
    return tuple(devices)


@contextlib.contextmanager
def _environment(library: Path) -> Iterator[None]:
    wanted = _ENVIRONMENT | {compiler.LIBRARY_PATH: str(library)}
    missing = {k: v for k, v in wanted.items() if k not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _local(name: str, platform: str, number: int) -> DeviceTopology:
    try:
        found = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise DeviceError(
            f"plan: there is no {platform} here for {name!r}: {error}"
        ) from error
    if not 1 <= number <= len(found):
        hint = f" Call rx.set_logical_devices({number}) first." * (platform == "cpu")
        raise DeviceError(
            f"plan: {name!r} asks for {number} devices; there are {len(found)} here."
            + hint
        )
    devices = found[:number]
    return DeviceTopology(
        name=name, devices=tuple(devices), rates=measure_rates(devices)
    )
