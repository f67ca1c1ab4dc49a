"""NVIDIA GPUs that `rx.plan` knows: rates, and descriptions for the CUDA compiler.

`devices.toml` has the figures. For a machine with another network or other links, the
options `--network-bandwidth` and `--link-bandwidth` replace two of them.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from replicax.engine.devices import Device
from replicax.planning.rates import KERNEL_SECONDS, Rates, device_tables

__all__ = ["CARDS", "MAX_CARDS", "Card"]

# Shares of the data sheet's figures, measured on an H100 with ResNet-50 and with a
# transformer (docs/gpus.md). The estimates use the same shares for other cards.
_ATTAINED_FLOPS = 0.8
_ATTAINED_BANDWIDTH = 0.85

MAX_CARDS = 8
"""Number of cards in the largest host; links connect all of them."""
_MAX_HOSTS = 128

_TARGET = """
gpu_device_info {{
  {facts}
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_memory_size: {memory}
  cuda_compute_capability {{ {capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{device}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A kind of NVIDIA GPU.

    Attributes:
        name: The name in topologies, such as `"h100"`.
        device: CUDA's name.
        rates: Rates of compute, memory, the links in a host, and a card's share of the
            host's network.
        capability: CUDA's compute capability, as XLA writes it.
        facts: Further fields of XLA's `GpuDeviceInfoProto`.
    """

    name: str
    device: str
    rates: Rates
    capability: str
    facts: Mapping[str, float]

    noun = "cluster"
    largest_scale = _MAX_HOSTS * MAX_CARDS

    @property
    def compute_capability(self) -> tuple[int, int]:
        """CUDA's compute capability, major and minor."""
        numbers = dict(re.findall(r"(major|minor): (\d+)", self.capability))
        return int(numbers["major"]), int(numbers.get("minor", 0))

    def describe_names(self) -> str:
        """Describe the names of clusters of this card, for messages."""
        return (
            f"{self.name}:N, N cards of one host, up to {MAX_CARDS}, and "
            f"{self.name}:HxN, H hosts of N cards, up to {_MAX_HOSTS}x{MAX_CARDS}"
        )

    def domain(self, device: Device) -> int:
        """The index of a card's host; links connect the cards of one host."""
        return device.process_index

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether a cluster can have this shape: cards, or hosts by cards."""
        *hosts, cards = shape
        return (
            len(hosts) <= 1
            and 1 <= cards <= MAX_CARDS
            and 1 <= math.prod(hosts) <= _MAX_HOSTS
        )

    def target(self) -> str:
        """Format the card's description for XLA's compiler."""
        return _TARGET.format(
            facts=" ".join(f"{name}: {value}" for name, value in self.facts.items()),
            memory=self.rates.memory_bytes,
            capability=self.capability,
            device=self.device,
        )


CARDS: Mapping[str, Card] = {
    name: Card(
        name=name,
        rates=Rates(
            **table.pop("rates"),
            attained_flops=_ATTAINED_FLOPS,
            attained_bandwidth=_ATTAINED_BANDWIDTH,
            kernel_seconds=KERNEL_SECONDS,
        ),
        **table,
    )
    for name, table in device_tables("cards").items()
}
"""The cards that `rx.plan` knows, by name."""
