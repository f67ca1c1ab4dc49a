"""The time model: what must hold whatever the hardware."""

import math
import re
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.planning.cards import CARDS
from replicax.planning.hlo_summary import Collective
from replicax.planning.rates import CHIPS
from replicax.planning.report import Memory
from replicax.planning.roofline import (
    collective_seconds,
    first_limit,
    grid_bandwidth,
    mean_hops,
    network_seconds,
    step_time,
)
from replicax.planning.schedule import Done, Schedule, Start
from replicax.planning.topology import DeviceTopology
from replicax.planning.work import StepCollectives, Work

TIMES = st.floats(0, 1e3)
KINDS = st.sampled_from(
    ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"]
)
BYTES = st.floats(1, 1e12)
BANDWIDTH = st.floats(1e6, 1e13)


@given(TIMES, TIMES, TIMES, TIMES, TIMES)
def test_a_step_is_never_shorter_than_its_parts(
    compute: float, memory: float, waited: float, hidden: float, network: float
) -> None:
    time = step_time(
        compute=compute, memory=memory, waited=waited, hidden=hidden, network=network
    )
    busy = max(compute, memory)
    assert time.total >= max(busy, waited, hidden, network)
    assert time.total <= (busy + waited + hidden + network) * (1 + 1e-12)
    # On one device there is no communication: an efficiency.
    assert time.total == 0 or 0 <= busy / time.total <= 1


@given(KINDS, BYTES, st.integers(1, 4096), BANDWIDTH, st.floats(1, 1e3))
def test_more_bandwidth_never_takes_longer(
    kind: str, size: float, num: int, bandwidth: float, factor: float
) -> None:
    slow = collective_seconds(kind, size, num, bandwidth)
    assert collective_seconds(kind, size, num, bandwidth * factor) <= slow
    assert (slow == 0) == (num == 1)


@given(KINDS, BYTES, st.integers(1, 4095), BANDWIDTH)
def test_more_devices_never_take_less(
    kind: str, size: float, num: int, bandwidth: float
) -> None:
    few = collective_seconds(kind, size, num, bandwidth)
    assert collective_seconds(kind, size, num + 1, bandwidth) >= few


@given(BYTES, st.integers(2, 4096), BANDWIDTH)
def test_a_sum_is_a_scatter_and_a_gather(
    size: float, num: int, bandwidth: float
) -> None:
    def of(kind: str) -> float:
        return collective_seconds(kind, size, num, bandwidth)

    both = of("reduce-scatter") + of("all-gather")
    assert of("all-reduce") == pytest.approx(both)
    assert of("all-reduce") < 2 * size / bandwidth


@given(BYTES, st.integers(2, 16), st.integers(1, 256), BANDWIDTH)
def test_larger_slices_share_the_network(
    size: float, num_slices: int, per_slice: int, bandwidth: float
) -> None:
    def seconds(chips: int) -> float:
        num = num_slices * chips
        return network_seconds("all-reduce", size, num, num_slices, bandwidth)

    assert seconds(2 * per_slice) == pytest.approx(seconds(per_slice) / 2)
    assert network_seconds("all-reduce", size, per_slice, 1, bandwidth) == 0


@pytest.mark.parametrize(
    ("chip", "extent", "shape", "links"),
    [
        ("v5e", (1, 1), (1, 1), 0),
        ("v5e", (2, 4), (2, 4), 2),  # Two open dimensions.
        ("v5e", (8, 16), (8, 16), 3),  # 16 chips close to a ring.
        ("v5e", (16, 16), (16, 16), 4),  # All links that a chip has.
        ("v5e", (1, 16), (16, 16), 2),
        ("v5e", (4, 8), (16, 16), 2),  # A part of a ring is open.
        ("v5p", (2, 2, 1), (2, 2, 1), 2),
        ("v5p", (2, 4, 4), (2, 4, 4), 3),  # Less than a cube is open.
        ("v5p", (4, 4, 4), (4, 4, 4), 6),
    ],
)
def test_links_of_boxes(chip: str, extent: Any, shape: Any, links: int) -> None:
    bandwidth = grid_bandwidth(CHIPS[chip], extent, shape)
    assert bandwidth == links * CHIPS[chip].link_bandwidth


def test_the_published_bandwidth_of_sums_is_met() -> None:
    # 51.2 TB/s of all-reduce for a pod of 256 chips: what they send in all.
    assert 256 * grid_bandwidth(CHIPS["v5e"], (16, 16), (16, 16)) == 51.2e12
    assert 256 * grid_bandwidth(CHIPS["v6e"], (16, 16), (16, 16)) == 102.4e12


def test_a_ring_has_fewer_hops() -> None:
    ring = mean_hops(CHIPS["v5e"], (16, 16), (16, 16))
    assert ring == 8 < mean_hops(CHIPS["v5e"], (15, 15), (16, 16))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda c: c.name)
def test_each_chip_has_all_rates(chip: Any) -> None:
    numbers = [
        chip.rates.peak_flops,
        chip.rates.memory_bytes,
        chip.rates.memory_bandwidth,
        chip.link_bandwidth,
    ]
    assert all(n > 0 for n in numbers)
    published = r"published at https://.* \(read \d{4}-\d\d-\d\d\)"
    assert re.fullmatch(published, chip.rates.source)
    assert all(math.prod(shape) <= chip.max_chips for shape in chip.shapes)


@given(st.sampled_from(list(CHIPS.values())), st.integers(0, 8))
def test_a_shape_has_the_given_number_of_chips(chip: Any, power: int) -> None:
    shape = chip.shape_of(2**power)
    assert math.prod(shape) == 2**power
    assert max(shape) <= 2 * min(n for n in shape if n > 1 or power < 3)


@pytest.mark.parametrize("card", CARDS.values(), ids=lambda c: c.name)
def test_each_card_has_all_rates(card: Any) -> None:
    rates = card.rates
    assert rates.elementwise_flops <= rates.flops_by_type["f32"] < rates.peak_flops
    assert 0 < rates.network_bandwidth < rates.ring_bandwidth < rates.memory_bandwidth
    published = r"published at https://www.nvidia.com/.* \(as of \d{4}-\d\d-\d\d\)"
    assert re.fullmatch(published, rates.source)
    target = card.target()
    assert f"device_memory_size: {rates.memory_bytes}" in target
    assert target.count("{") == target.count("}")
    # What XLA reckons with is what the data sheet says.
    memory = card.facts["memory_bandwidth"]
    assert memory == pytest.approx(rates.memory_bandwidth, rel=0.05)


def cluster(name: str, cards: int, hosts: int) -> DeviceTopology:
    """A topology without the compiler: its devices know their host only."""
    card = CARDS[name]
    return DeviceTopology(
        name=f"{name}:{hosts}x{cards}",
        devices=tuple(
            types.SimpleNamespace(process_index=host, device_kind=card.device)
            for host in range(hosts)
            for _ in range(cards)
        ),
        rates=card.rates,
        chip=card,
        shape=(hosts, cards) if hosts > 1 else (cards,),
    )


def nccl_seconds(
    kind: str, groups: Any = (), *, cards: int = 8, hosts: int = 1
) -> tuple[float, float]:
    """Seconds of a collective of 80 MB over links and network."""
    collective = Collective(
        kind=kind, dtype="f32", bytes=80_000_000, count=1, groups=groups, is_async=True
    )
    parts = StepCollectives(
        cluster("h100", cards, hosts), cards * hosts, [collective], num_steps=1
    )
    work = Work(
        flops=0,
        bytes=0,
        compute=0,
        memory=0,
        schedule=Schedule((Start("c", collective), Done("c"))),
        is_loop_of_steps=False,
    )
    time = parts.step_time(work)
    assert time.exposed == time.total == pytest.approx(time.links + time.network)
    return time.links, time.network


@pytest.mark.parametrize(
    ("kind", "factor"), [("all-reduce", 2), ("reduce-scatter", 1), ("all-gather", 1)]
)
def test_collectives_in_a_host_run_at_the_bus_bandwidth(kind: str, factor: int) -> None:
    links, network = nccl_seconds(kind)
    assert links == pytest.approx(factor * 7 / 8 * 80e6 / 450e9)
    assert network == 0
    links, _ = nccl_seconds(kind, cards=2)
    assert links == pytest.approx(factor * 1 / 2 * 80e6 / 450e9)


@pytest.mark.parametrize(
    ("kind", "factor"), [("all-reduce", 2), ("reduce-scatter", 1), ("all-gather", 1)]
)
def test_collectives_over_hosts_are_hierarchical(kind: str, factor: int) -> None:
    links, network = nccl_seconds(kind, hosts=16)
    # Eight cards of a host share the payload on their ways to other hosts.
    assert network == pytest.approx(factor * 15 / 16 * 80e6 / 8 / 50e9)
    # Links and network work at the same time: the slower one counts.
    alone, _ = nccl_seconds(kind)
    assert links + network == pytest.approx(max(alone, network))


def test_groups_of_one_card_a_host_use_the_network_alone() -> None:
    groups = tuple(tuple(range(i, 16, 8)) for i in range(8))
    links, network = nccl_seconds("all-reduce", groups, hosts=2)
    assert (links, network) == (0, pytest.approx(80e6 / 50e9))
    links, network = nccl_seconds(
        "all-reduce", (tuple(range(8)), tuple(range(8, 16))), hosts=2
    )
    assert (links, network) == (pytest.approx(2 * 7 / 8 * 80e6 / 450e9), 0)


@given(st.integers(1, 8), st.integers(1, 128), st.integers(0, 10))
def test_clusters_grow_host_by_host(cards: int, hosts: int, power: int) -> None:
    topology = cluster("a100-40g", cards, hosts)
    size = 2**power
    shape = topology.shape_of(size)
    assert math.prod(shape) >= size
    assert topology.num_domains(size) == (shape[0] if len(shape) > 1 else 1)


MEMORY = Memory(arguments=10, outputs=5, aliased=4, temporaries=3, code=1, capacity=100)


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        ({"compute": 9.0}, "compute"),
        ({"memory": 9.0}, "memory bandwidth"),
        ({"waited": 9.0}, "interconnect"),
        ({"hidden": 9.0}, "interconnect"),
        ({"network": 9.0}, "network"),
    ],
)
def test_the_longest_part_limits(changed: dict[str, float], limit: str) -> None:
    parts = {"compute": 1.0, "memory": 1.0, "waited": 1.0, "hidden": 1.0}
    time = step_time(**{**parts, "network": 1.0, **changed})
    found, advice = first_limit(time, fits=True, num_devices=8)
    assert found == limit
    assert advice.endswith(".")
    found, advice = first_limit(time, fits=False, num_devices=8)
    assert found == "memory capacity"
    assert "smaller batch" in advice
