"""Names of hardware."""

import jax
import pytest

from replicax.errors import DeviceError
from replicax.planning.cards import CARDS
from replicax.planning.rates import CHIPS
from replicax.planning.topology import (
    check_topology,
    described_chip,
    find_topology,
    num_cpu_devices,
)

ALL = [
    f"{chip.name}:{'x'.join(map(str, shape))}"
    for chip in CHIPS.values()
    for shape in chip.shapes
]


@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize("name", ALL)
def test_the_compiler_knows_all_listed_slices(name: str) -> None:
    topology = find_topology(name)
    everyone = range(len(topology.devices))
    assert topology.extent(everyone) == topology.shape
    num_hosts = len({d.process_index for d in topology.devices})
    assert len(topology.devices) <= 4 or num_hosts > 1
    assert topology.spans_hosts(everyone) == (num_hosts > 1)
    assert not topology.spans_hosts([0])
    hosts = [d.process_index for d in topology.devices]
    assert hosts == sorted(hosts)  # Each host's devices are together.


@pytest.mark.usefixtures("tpu_compiler")
def test_cubes_and_several_slices() -> None:
    assert len(find_topology("v5p:8x8x8").devices) == 512
    two = find_topology("v5e:2x4", 2)
    assert two.name == "2 x v5e:2x4"
    assert len(two.devices) == 16
    assert two.extent(range(16)) == (2, 4)
    assert [two.num_slices_of(g) for g in (range(8), range(16))] == [1, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:0x2", r"no slice 'v5e:0x2'\. Known: v5e:1x1, .*v5e:16x16\."),
        ("v5p:4x4x6", "no slice 'v5p:4x4x6'.*boxes of such cubes"),
        ("v5p:8x4x4", "no slice"),
        ("v9:2x2", r"unknown topology 'v9:2x2'\. Known: v4:.*v5e:.*v6e:.*cpu:N, gpu:N"),
        ("v9:2", r"Known: .*h100:N, N cards of one host, up to 8, and h100:HxN"),
        ("h100:9", r"no cluster 'h100:9'\. Known: h100:N.*up to 128x8\.$"),
        ("h100:129x8", "no cluster"),
        ("h100:0x8", "no cluster"),
        ("h100:1x1x1", "no cluster 'h100:1x1x1'"),
        ("h100:" + 5000 * "9", "no cluster 'h100:999"),  # More than `int` reads.
        ("h100", r"no cluster 'h100'\. Known: h100:N"),
        ("v5e", r"no slice 'v5e'\. Known: v5e:1x1, "),
        ("h900:8", f"unknown topology 'h900:8'.*{'.*'.join(f'{c}:N' for c in CARDS)}"),
        ("", "unknown topology ''"),
    ],
)
def test_unknown_topologies_list_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        check_topology(name)
    with pytest.raises(DeviceError, match=message):
        find_topology(name)


def test_devices_of_this_machine() -> None:
    topology = find_topology("cpu:4")
    assert [d.id for d in topology.devices] == [0, 1, 2, 3]
    assert topology.extent(range(4)) == ()
    rates = topology.rates
    assert rates.peak_flops > 0
    assert rates.memory_bandwidth > 0
    assert rates.ring_bandwidth is not None
    assert rates.memory_bytes is None  # All share the machine's.
    assert rates.source.startswith("measured on 4 x cpu of this machine")
    assert find_topology("cpu:1").rates.ring_bandwidth is None
    assert num_cpu_devices("cpu:12") == 12
    assert num_cpu_devices("v5e:2x2") is None


@pytest.mark.parametrize(
    ("name", "num_slices", "message"),
    [
        ("cpu:9", 1, "asks for 9 devices; there are 8.*set_logical_devices"),
        ("cpu:0", 1, "asks for 0 devices"),
        ("cpu:2", 2, "num_slices=2 needs TPU slices"),
        ("h100:8", 2, "num_slices=2 needs TPU slices; 'h100:8' names GPUs, as in h100"),
        ("v5e:2x2", 0, "num_slices must be at least 1; got 0"),
    ],
)
def test_absent_devices_are_an_error(name: str, num_slices: int, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        find_topology(name, num_slices)


def test_gpus_on_a_machine_without_gpus_are_an_error() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="there is no gpu here for 'gpu:1'"):
        find_topology("gpu:1")


@pytest.mark.parametrize(
    ("name", "what", "value", "message"),
    [
        ("h100:8", "link_bandwidth", 0.0, "link_bandwidth must be bytes per second"),
        ("v5e:2x4", "network_bandwidth", -1.0, "more than 0; got -1.0"),
        ("h100:8", "network_bandwidth", float("nan"), "got nan"),
        ("cpu:2", "link_bandwidth", 1e9, "rates of 'cpu:2' are measured"),
    ],
)
def test_wrong_bandwidths_are_errors(
    name: str, what: str, value: float, message: str
) -> None:
    with pytest.raises(DeviceError, match=message):
        check_topology(name, **{what: value})


@pytest.mark.usefixtures("tpu_compiler")
def test_bandwidths_of_the_user_replace_the_published_ones() -> None:
    topology = find_topology("v5e:2x4", link_bandwidth=1e9)
    assert topology.rates.ring_bandwidth == 1e9
    assert topology.rates.source.endswith("; links as given")


@pytest.mark.parametrize("card", CARDS)
def test_kinds_of_described_devices(card: str) -> None:
    for shape in ("1", "8", "2x4", "128x8"):
        check_topology(f"{card}:{shape}")
        assert described_chip(f"{card}:{shape}") is CARDS[card]
    assert described_chip("v5e:2x4") is CHIPS["v5e"]
    assert described_chip("gpu:4") is None
