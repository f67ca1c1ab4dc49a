"""NVIDIA GPUs that `rx.plan` knows: their rates, and what the CUDA compiler must know.

Figures are per card and dense (no sparsity), and bandwidths in one direction: NVIDIA's
data sheets give both directions of all links of a card. The network is that of
NVIDIA's DGX with eight of the cards, or of a cloud's host of eight where there is none;
`--network-bandwidth` and `--link-bandwidth` say what another machine has.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from replicax.engine.devices import Device
from replicax.planning.rates import KERNEL_SECONDS, Rates

__all__ = ["CARDS", "MAX_CARDS", "Card"]

_COLLECTED = "2026-11-23"
_PAGES = "https://www.nvidia.com/en-us/data-center"

# So that times agree with those that an H100 took for steps of ResNet-50 and of a
# transformer (docs/gpus.md). There, large kernels moved their bytes at nine tenths of
# the data sheet's bandwidth, smaller ones at half of it, and products ran at four
# fifths of its FLOP/s. Other cards are taken to be alike.
_ATTAINED_FLOPS = 0.8
_ATTAINED_BANDWIDTH = 0.85

MAX_CARDS = 8
"""Cards that links join: those of the largest host."""
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
        name: As in topologies, such as `"h100"`.
        device: CUDA's name of it.
        rates: Of its computing, its memory, the links to the cards of its host, and its
            share of the host's network.
        capability: CUDA's compute capability, as XLA writes it.
        facts: What else XLA knows of it, in the words of XLA's `GpuDeviceInfoProto`.
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

    def known(self) -> str:
        """List the names of its clusters, for messages."""
        return (
            f"{self.name}:N, N cards of one host, up to {MAX_CARDS}, and "
            f"{self.name}:HxN, H hosts of N cards, up to {_MAX_HOSTS}x{MAX_CARDS}"
        )

    def domain(self, device: Device) -> int:
        """The index of a card's host, within which links join the cards."""
        return device.process_index

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether there are clusters of that shape: cards, or hosts by cards."""
        *hosts, cards = shape
        return (
            len(hosts) <= 1
            and 1 <= cards <= MAX_CARDS
            and 1 <= math.prod(hosts) <= _MAX_HOSTS
        )

    def target(self) -> str:
        """The description of the card that XLA's compiler takes."""
        return _TARGET.format(
            facts=" ".join(f"{name}: {value}" for name, value in self.facts.items()),
            memory=self.rates.memory_bytes,
            capability=self.capability,
            device=self.device,
        )


def _rates(
    *,
    bfloat16: float,
    float32: float,
    elementwise: float,
    memory_bytes: int,
    memory_bandwidth: float,
    links: float,
    network: float,
    source: str,
) -> Rates:
    return Rates(
        peak_flops=bfloat16,
        flops_by_type={"f32": float32},
        elementwise_flops=elementwise,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
        ring_bandwidth=links,
        network_bandwidth=network,
        attained_flops=_ATTAINED_FLOPS,
        attained_bandwidth=_ATTAINED_BANDWIDTH,
        kernel_seconds=KERNEL_SECONDS,
        source=f"published at {_PAGES}/{source} (as of {_COLLECTED})",
    )


def _facts(
    cores: int,
    floats_per_core: int,
    clock_ghz: float,
    cache_bytes: int,
    memory_bandwidth: int,
    shared_bytes: int,
    threads: int = 2048,
) -> Mapping[str, float]:
    return {
        "core_count": cores,
        "fpus_per_core": floats_per_core,
        "clock_rate_ghz": clock_ghz,
        "l2_cache_size": cache_bytes,
        "memory_bandwidth": memory_bandwidth,
        "shared_memory_per_core": shared_bytes,
        # CUDA keeps a KiB of a block's for itself.
        "shared_memory_per_block_optin": shared_bytes - 1024,
        "threads_per_core_limit": threads,
    }


_HOPPER = "major: 9 feature_extension: ACCELERATED_FEATURES"
_H100_FACTS = _facts(132, 128, 1.98, 50 * 2**20, 3_352_320_000_000, 233_472)
_A100_FACTS = _facts(108, 64, 1.41, 40 * 2**20, 2_039_040_000_000, 167_936)

CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card(
            name="h100",
            device="NVIDIA H100 80GB HBM3",
            rates=_rates(
                bfloat16=989.4e12,
                float32=494.7e12,  # As TF32, in which XLA multiplies by default.
                elementwise=66.9e12,
                memory_bytes=84_942_979_072,
                memory_bandwidth=3350e9,
                links=900e9 / 2,
                network=400e9 / 8,
                source="h100; network: DGX H100, 400 Gb/s a card",
            ),
            capability=_HOPPER,
            facts=_H100_FACTS,
        ),
        Card(
            name="h200",
            device="NVIDIA H200",
            rates=_rates(
                bfloat16=989.4e12,
                float32=494.7e12,
                elementwise=66.9e12,
                memory_bytes=151_397_597_184,
                memory_bandwidth=4800e9,
                links=900e9 / 2,
                network=400e9 / 8,
                source="h200; network: DGX H200, 400 Gb/s a card",
            ),
            capability=_HOPPER,
            facts={**_H100_FACTS, "memory_bandwidth": 4_800_000_000_000},
        ),
        Card(
            name="b200",
            device="NVIDIA B200",
            rates=_rates(
                bfloat16=2250e12,
                float32=1100e12,
                elementwise=75e12,
                memory_bytes=191_514_411_008,
                memory_bandwidth=8000e9,
                links=1800e9 / 2,
                network=400e9 / 8,
                source="dgx-b200; network: DGX B200, 400 Gb/s a card",
            ),
            capability="major: 10 feature_extension: ACCELERATED_FEATURES",
            facts=_facts(148, 128, 1.965, 132_644_864, 7_672_320_000_000, 233_472),
        ),
        Card(
            name="a100-80g",
            device="NVIDIA A100-SXM4-80GB",
            rates=_rates(
                bfloat16=312e12,
                float32=156e12,
                elementwise=19.5e12,
                memory_bytes=85_100_068_864,
                memory_bandwidth=2039e9,
                links=600e9 / 2,
                network=200e9 / 8,
                source="a100; network: DGX A100, 200 Gb/s a card",
            ),
            capability="major: 8",
            facts=_A100_FACTS,
        ),
        Card(
            name="a100-40g",
            device="NVIDIA A100-SXM4-40GB",
            rates=_rates(
                bfloat16=312e12,
                float32=156e12,
                elementwise=19.5e12,
                memory_bytes=42_331_013_120,
                memory_bandwidth=1555e9,
                links=600e9 / 2,
                network=200e9 / 8,
                source="a100; network: DGX A100, 200 Gb/s a card",
            ),
            capability="major: 8",
            facts={**_A100_FACTS, "memory_bandwidth": 1_555_200_000_000},
        ),
        Card(
            name="l4",
            device="NVIDIA L4",
            rates=_rates(
                bfloat16=121e12,
                float32=60e12,
                elementwise=30.3e12,
                memory_bytes=23_034 * 2**20,
                memory_bandwidth=300e9,
                links=64e9 / 2,  # PCIe, 4th generation, 16 lanes.
                network=100e9 / 8 / 8,
                source="l4; links: PCIe; network: 100 Gb/s for 8, as in a g6.48xlarge",
            ),
            capability="major: 8 minor: 9",
            facts=_facts(58, 128, 2.04, 48 * 2**20, 300_096_000_000, 102_400, 1536),
        ),
        Card(
            name="l40s",
            device="NVIDIA L40S",
            rates=_rates(
                bfloat16=362e12,
                float32=183e12,
                elementwise=91.6e12,
                memory_bytes=46_068 * 2**20,
                memory_bandwidth=864e9,
                links=64e9 / 2,  # PCIe, 4th generation, 16 lanes.
                network=400e9 / 8 / 8,
                source="l40s; links: PCIe; network: 400 Gb/s for 8, as in a "
                "g6e.48xlarge",
            ),
            capability="major: 8 minor: 9",
            facts=_facts(142, 128, 2.52, 96 * 2**20, 864_096_000_000, 102_400, 1536),
        ),
        Card(
            name="v100",
            device="Tesla V100-SXM2-16GB",
            rates=dataclasses.replace(
                _rates(
                    bfloat16=125e12,  # In float16: mixed_float16 is the policy there.
                    float32=15.7e12,
                    elementwise=15.7e12,
                    memory_bytes=16_935_682_048,
                    memory_bandwidth=900e9,
                    links=300e9 / 2,
                    network=4 * 100e9 / 8 / 8,
                    source="v100; network: DGX-1, 4 x 100 Gb/s for 8",
                ),
                # It has no bfloat16, and is made to multiply it in float32.
                flops_by_type={"f32": 15.7e12, "bf16": 15.7e12},
            ),
            capability="major: 7",
            facts={
                **_facts(80, 64, 1.53, 6 * 2**20, 898_048_000_000, 98_304),
                "shared_memory_per_block_optin": 98_304,
            },
        ),
    )
}
"""The cards that `rx.plan` knows, by name."""
