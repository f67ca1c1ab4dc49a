"""Resolves names such as `"v5e:16x16"` and `"h100:4x8"` to devices and their rates."""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from replicax.engine.devices import Device
from replicax.errors import DeviceError
from replicax.planning import compiler
from replicax.planning.cards import CARDS, MAX_CARDS, Card
from replicax.planning.rates import CHIPS, Chip, Rates, measure_rates

__all__ = [
    "DeviceTopology",
    "check_topology",
    "described_chip",
    "find_topology",
    "num_cpu_devices",
]

_LOCAL = re.compile(r"(cpu|gpu):(\d+)")
_SHAPE = re.compile(r"\d{1,9}(?:x\d{1,9})*")
_KINDS: Mapping[str, Chip | Card] = {**CHIPS, **CARDS}

# libtpu looks up this machine's place in a slice, and logs errors outside of a slice.
# These variables replace the look-up, unless they are already set.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    # libtpu's lock is for processes that use the chips.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceTopology:
    """Devices to compile for, one replica on each.

    Attributes:
        devices: The devices in the replicas' order. Programs can be compiled for
            described devices, but not run.
        chip: The kind of TPU or GPU; None for devices of this machine.
        shape: The grid of chips of one TPU slice, or GPU hosts and cards per host;
            empty for devices of this machine.
    """

    name: str
    devices: tuple[Device, ...]
    rates: Rates
    chip: Chip | Card | None = None
    shape: tuple[int, ...] = ()
    num_slices: int = 1

    def spans_hosts(self, group: Sequence[int]) -> bool:
        """Whether the devices at these positions are on several machines."""
        return len({self.devices[i].process_index for i in group}) > 1

    def num_slices_of(self, group: Sequence[int]) -> int:
        """Number of slices of TPUs that hold the devices at these positions."""
        return self.num_domains_of(group) if self.num_slices > 1 else 1

    def num_domains_of(self, group: Sequence[int]) -> int:
        """Number of domains (slices of TPUs, hosts of GPUs) that a group spans.

        Links connect the devices of one domain; the network connects domains.
        """
        if self.chip is None:
            return 1
        return len({self.chip.domain(self.devices[i]) for i in group})

    def num_domains(self, size: int) -> int:
        """Number of domains of a topology of this kind with `size` devices.

        TPUs are in one slice, unless this topology has several slices.
        """
        if isinstance(self.chip, Card):
            return math.ceil(size / self._cards_of_a_host)
        if self.num_slices == 1:
            return 1
        return max(size // math.prod(self.shape), 1)

    def shape_of(self, size: int) -> tuple[int, ...]:
        """The shape of `size` devices; for several slices, the shape of one slice."""
        if isinstance(self.chip, Card):
            hosts = self.num_domains(size)
            return (size,) if hosts == 1 else (hosts, self._cards_of_a_host)
        assert self.chip is not None  # Devices of this machine have no shape.
        if size == len(self.devices) or self.num_domains(size) > 1:
            return self.shape
        return self.chip.shape_of(size)

    @property
    def _cards_of_a_host(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else MAX_CARDS

    def extent(self, group: Sequence[int]) -> tuple[int, ...]:
        """The box of chips, in one slice, that holds the devices at these positions."""
        if not isinstance(self.chip, Chip):
            return ()
        coords = [self.devices[i].coords for i in group]
        spans = [len(set(axis)) for axis in zip(*coords, strict=True)]
        return tuple(spans[: self.chip.num_dims])


def find_topology(
    name: str,
    num_slices: int = 1,
    *,
    link_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
) -> DeviceTopology:
    """Find the devices of a topology; the bandwidths replace the published ones."""
    check_topology(
        name,
        num_slices,
        link_bandwidth=link_bandwidth,
        network_bandwidth=network_bandwidth,
    )
    if local := _LOCAL.fullmatch(name):
        return _local(name, local[1], int(local[2]))
    chip, shape = _parsed(name)
    if isinstance(chip, Card):
        devices = _described_cards(name, chip, shape)
    else:
        devices = _described_chips(name, chip, shape, num_slices)
    return DeviceTopology(
        name=name if num_slices == 1 else f"{num_slices} x {name}",
        devices=devices,
        rates=_with_bandwidths(chip.rates, link_bandwidth, network_bandwidth),
        chip=chip,
        shape=shape,
        num_slices=num_slices,
    )


def check_topology(name: str, num_slices: int = 1, **bandwidths: float | None) -> None:
    """Raise for an unknown topology or a wrong option, without finding devices."""
    if not isinstance(num_slices, int) or num_slices < 1:
        raise DeviceError(f"plan: num_slices must be at least 1; got {num_slices!r}.")
    chip = described_chip(name)
    local = chip is None
    if num_slices > 1 and not isinstance(chip, Chip):
        kind = "devices of this machine" if local else "GPUs, as in h100:4x8"
        raise DeviceError(
            f"plan: num_slices={num_slices} needs TPU slices; {name!r} names {kind}."
        )
    for option, value in bandwidths.items():
        if value is not None and local:
            raise DeviceError(
                f"plan: {option}={value!r} is for described hardware; the rates of "
                f"{name!r} are measured."
            )
        if value is not None and not 0 < value < math.inf:
            raise DeviceError(
                f"plan: {option} must be bytes per second, more than 0; got {value!r}."
            )


def described_chip(name: str) -> Chip | Card | None:
    """The kind of TPU or GPU of a topology; None for devices of this machine."""
    return None if _LOCAL.fullmatch(name) else _parsed(name)[0]


def num_cpu_devices(name: str) -> int | None:
    """Number of CPU devices of a topology such as `"cpu:8"`; None for all others."""
    match = _LOCAL.fullmatch(name)
    return int(match[2]) if match and match[1] == "cpu" else None


def _parsed(name: str) -> tuple[Chip | Card, tuple[int, ...]]:
    kind, _, sizes = name.partition(":")
    chip = _KINDS.get(kind)
    if chip is None:
        known = "; ".join(kind.describe_names() for kind in _KINDS.values())
        raise DeviceError(
            f"plan: unknown topology {name!r}. Known: {known}. Devices of this "
            "machine: cpu:N, gpu:N."
        )
    shape = tuple(map(int, sizes.split("x"))) if _SHAPE.fullmatch(sizes) else ()
    if not shape or not chip.has_shape(shape):
        raise DeviceError(
            f"plan: there is no {chip.noun} {name!r}. Known: {chip.describe_names()}."
        )
    return chip, shape


def _with_bandwidths(rates: Rates, links: float | None, network: float | None) -> Rates:
    """Replace published bandwidths by the user's."""
    changes = {"ring_bandwidth": links, "network_bandwidth": network}
    changes = {name: value for name, value in changes.items() if value is not None}
    if not changes:
        return rates
    words = [x.removesuffix("_bandwidth").replace("ring", "links") for x in changes]
    source = f"{rates.source}; {' and '.join(words)} as given"
    return dataclasses.replace(rates, **changes, source=source)


def _described_cards(
    name: str, card: Card, shape: tuple[int, ...]
) -> tuple[Device, ...]:
    compiler.require_cuda(name)
    from jax.experimental import topologies

    *hosts, cards = shape
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            target_config=card.target(),
            topology=f"1x{math.prod(hosts)}x{cards}",
        )
    except NotImplementedError as error:
        raise DeviceError(
            f"plan: JAX started without the CUDA compiler that {name!r} needs: it "
            "found no GPU for it. Set JAX_PLATFORMS=cpu in the environment, as "
            "`replicax plan` does."
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise DeviceError(
            f"plan: the installed CUDA compiler does not support {name!r}: {error}"
        ) from error
    return tuple(description.devices)


def _described_chips(
    name: str, chip: Chip, shape: tuple[int, ...], num_slices: int
) -> tuple[Device, ...]:
    library = compiler.require_libtpu(name)
    from jax.experimental import topologies

    options: dict[str, str | int] = dict(chip.options)
    if num_slices > 1:
        options["num_slices"] = num_slices
    with _environment(library):
        try:
            description = topologies.get_topology_desc(name, "tpu", **options)
        except jax.errors.JaxRuntimeError as error:
            raise DeviceError(
                f"plan: the installed libtpu does not know {name!r}: {error} "
                f"Known: {chip.describe_names()}."
            ) from error
    devices = sorted(description.devices, key=lambda d: (d.process_index, d.id))
    if len(devices) != math.prod(shape) * num_slices:
        raise DeviceError(
            f"plan: libtpu describes {name!r} as {len(devices)} devices, not as one "
            "for each chip. Use another topology or another version of libtpu."
        )
    return tuple(devices)


@contextlib.contextmanager
def _environment(library: Path) -> Iterator[None]:
    variables = _ENVIRONMENT | {compiler.LIBRARY_PATH: str(library)}
    missing = {k: v for k, v in variables.items() if k not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _local(name: str, platform: str, number: int) -> DeviceTopology:
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise DeviceError(
            f"plan: there is no {platform} here for {name!r}: {error}"
        ) from error
    if not 1 <= number <= len(devices):
        hint = f" Call rx.set_logical_devices({number}) first." * (platform == "cpu")
        raise DeviceError(
            f"plan: {name!r} asks for {number} devices; there are {len(devices)} here."
            + hint
        )
    devices = devices[:number]
    return DeviceTopology(
        name=name, devices=tuple(devices), rates=measure_rates(devices)
    )
