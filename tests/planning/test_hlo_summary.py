"""What is read out of compiled programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from replicax.errors import InternalError
from replicax.planning.hlo import replica_groups, source_target_groups
from replicax.planning.hlo_summary import Collective, read_program
from replicax.planning.topology import find_topology

X = jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]


def compiled_text(fn: Callable[[Any], Any], devices: Any = None, *, x: Any = X) -> str:
    """The text of `fn`, each of 8 devices getting its entry of `x`."""
    mesh = Mesh(np.array(jax.devices() if devices is None else devices), ("r",))
    spec = PartitionSpec("r")
    program = jax.jit(
        jax.shard_map(
            lambda x: fn(x[0])[None],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    text = program.lower(x).compile().as_text()
    assert text is not None
    return text


def only(text: str) -> Collective:
    (collective,) = read_program(text).collectives
    return collective


CASES = [
    pytest.param(lambda x: lax.psum(x, "r"), "all-reduce", 16 * 32 * 4, 8, id="sum"),
    pytest.param(
        lambda x: lax.psum(x, "r", axis_index_groups=PAIRS),
        "all-reduce",
        16 * 32 * 4,
        2,
        id="sum in pairs",
    ),
    pytest.param(
        lambda x: lax.psum_scatter(x, "r", tiled=True),
        "reduce-scatter",
        16 * 32 * 4,
        8,
        id="scatter",
    ),
    pytest.param(
        lambda x: lax.all_gather(x, "r", tiled=True),
        "all-gather",
        8 * 16 * 32 * 4,
        8,
        id="gather",
    ),
    pytest.param(
        lambda x: lax.all_to_all(x, "r", 0, 0, tiled=True),
        "all-to-all",
        16 * 32 * 4,
        8,
        id="exchange",
    ),
    pytest.param(
        lambda x: lax.ppermute(x, "r", [(i, (i + 1) % 8) for i in range(8)]),
        "collective-permute",
        16 * 32 * 4,
        8,
        id="shift",
    ),
]


@pytest.mark.parametrize(("fn", "kind", "size", "group"), CASES)
def test_collectives_of_cpus(fn: Any, kind: str, size: int, group: int) -> None:
    found = only(compiled_text(fn))
    assert (found.kind, found.dtype, found.count) == (kind, "f32", 1)
    assert found.bytes == size
    assert {len(g) for g in found.groups} == {group}
    assert sorted(i for g in found.groups for i in g) == list(range(8))


@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize(("fn", "kind", "size", "group"), CASES)
def test_collectives_of_tpus(fn: Any, kind: str, size: int, group: int) -> None:
    found = only(compiled_text(fn, find_topology("v5e:2x4").devices))
    # Small gathers and scatters are sums to the TPU compiler.
    assert found.kind in (kind, "all-reduce")
    if found.kind == kind:
        assert found.bytes == size
    assert {len(g) for g in found.groups} == {group}


def test_a_sum_of_several_arrays_is_one_collective() -> None:
    def sums(x: Any) -> Any:
        a, b = lax.psum((x, x[:1].astype(jnp.bfloat16)), "r")
        return a + b.astype(a.dtype)

    found = read_program(compiled_text(sums)).collectives
    assert sum(c.bytes * c.count for c in found) in (
        16 * 32 * 4 + 32 * 2,
        16 * 32 * 4 + 32 * 4,  # CPUs sum bfloat16 as float32.
    )


def scan(x: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        return jnp.tanh(lax.psum(carry @ carry, "r")), None

    return lax.scan(body, x, length=5)[0]


SQUARE = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)


@pytest.mark.parametrize("topology", ["cpu", "v5e:2x4"])
def test_loops_count_each_iteration(
    topology: str, request: pytest.FixtureRequest
) -> None:
    devices = None
    if topology != "cpu":
        request.getfixturevalue("tpu_compiler")
        devices = find_topology(topology).devices
    contents = read_program(compiled_text(scan, devices, x=SQUARE))
    assert contents.trip_counts == (5,)
    (collective,) = contents.collectives
    assert collective.count == 5
    assert contents.loop_flops == 4 * 2 * 64**3  # XLA counts the first round.


def test_a_loop_of_unknown_length_counts_once() -> None:
    def loop(x: Any) -> Any:
        return lax.while_loop(
            lambda v: v.sum() < 1e6, lambda v: v + lax.psum(v, "r"), x
        )

    contents = read_program(compiled_text(loop))
    assert contents.trip_counts == (None,)
    assert [c.count for c in contents.collectives] == [1]


@pytest.mark.usefixtures("tpu_compiler")
def test_bytes_on_a_tpus_chip_are_left_out() -> None:
    devices = find_topology("v5e:2x4").devices

    def several(x: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(lax.psum(x, "r"))
        return x

    assert 0 < read_program(compiled_text(several, devices)).on_chip < 1
    assert read_program(compiled_text(several)).on_chip == 0


ASYNC = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%wrapped (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %rs = f32[1]{0} reduce-scatter(%p), replica_groups=[1,4]<=[4], to_apply=%add
}

ENTRY %main (x: f32[4]) -> f32[8] {
  %x = f32[4]{0} parameter(0)
  %gather = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[2,2]<=[4]
  %ars = f32[4]{0} all-reduce-start(%x), replica_groups={}, to_apply=%add
  %rss = ((f32[4]{0}), f32[1]{0}) async-start(%x), calls=%wrapped
  %gathered = f32[8]{0} all-gather-done(%gather)
  %ard = f32[4]{0} all-reduce-done(%ars)
  %rsd = f32[1]{0} async-done(%rss), calls=%wrapped
  ROOT %r = f32[8]{0} copy(%gathered)
}
"""


# From JAX 0.11 on an all-reduce's start has its operands, too, as others always have.
@pytest.mark.parametrize("started", ["f32[4]{0}", "((f32[4]{0}), f32[4]{0})"])
def test_asynchronous_collectives(started: str) -> None:
    text = ASYNC.replace("%ars = f32[4]{0}", f"%ars = {started}")
    found = {c.kind: c for c in read_program(text).collectives}
    assert all(c.is_async and c.count == 1 for c in found.values())
    assert {kind: c.bytes for kind, c in found.items()} == {
        "all-gather": 32,
        "all-reduce": 16,
        "reduce-scatter": 16,
    }
    assert found["all-gather"].groups == ((0, 1), (2, 3))
    assert found["all-reduce"].groups == ()


WINDOWED = """HloModule m

%more (s: (u32[], bf16[32,128,768,1], bf16[32,128,2,192])) -> pred[] {
  %s = (u32[], bf16[32,128,768,1]{3,2,1,0}, bf16[32,128,2,192]{3,2,1,0}) parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %n = u32[] constant(8)
  ROOT %p = pred[] compare(%i, %n), direction=LT
}

%body (s: (u32[], bf16[32,128,768,1], bf16[32,128,2,192])) -> (u32[], bf16[32,128,768,1], bf16[32,128,2,192]) {
  %s = (u32[], bf16[32,128,768,1]{3,2,1,0}, bf16[32,128,2,192]{3,2,1,0}) parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%i, %two)
  %x = bf16[32,128,768,1]{3,2,1,0} get-tuple-element(%s), index=1
  %y = bf16[32,128,2,192]{3,2,1,0} get-tuple-element(%s), index=2
  %z = f32[768,2,192,1]{3,2,1,0} convolution(%x, %y), window={size=2x32 pad=1_1x0_0 rhs_reversal=1x0}, dim_labels=1fb0_1i0o->b0f1
  ROOT %t = (u32[], bf16[32,128,768,1]{3,2,1,0}, bf16[32,128,2,192]{3,2,1,0}) tuple(%next, %x, %y)
}

ENTRY %main (x: bf16[32,128,768,1], y: bf16[32,128,2,192]) -> (u32[], bf16[32,128,768,1], bf16[32,128,2,192]) {
  %x = bf16[32,128,768,1]{3,2,1,0} parameter(0)
  %y = bf16[32,128,2,192]{3,2,1,0} parameter(1)
  %zero = u32[] constant(0)
  %s = (u32[], bf16[32,128,768,1]{3,2,1,0}, bf16[32,128,2,192]{3,2,1,0}) tuple(%zero, %x, %y)
  ROOT %w = (u32[], bf16[32,128,768,1]{3,2,1,0}, bf16[32,128,2,192]{3,2,1,0}) while(%s), condition=%more, body=%body
}
"""  # noqa: E501


def test_a_windowed_loop_of_a_tpu() -> None:
    """The counter goes up by two, and half of the convolution meets padding."""
    contents = read_program(WINDOWED)
    assert contents.trip_counts == (4,)
    product = 2 * (32 * 128) * 768 * (2 * 192)
    assert contents.loop_flops == 3 * product


CHAIN = """HloModule m

%start (p: f32[1]) -> (f32[1], f32[4]) {
  %p = f32[1]{0} parameter(0)
  %g = f32[4]{0} all-gather(%p), replica_groups={}, frontend_attributes={chain_id="0"}
  ROOT %c = (f32[1]{0}, f32[4]{0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%overlap (q: f32[1]) -> f32[4] {
  %q = f32[1]{0} parameter(0)
  ROOT %g = f32[4]{0} all-gather(%q), replica_groups={}, frontend_attributes={chain_id="0"}
}

ENTRY %main (x: f32[1]) -> f32[4] {
  %x = f32[1]{0} parameter(0)
  %s = (f32[1]{0}, f32[4]{0}) fusion(%x), kind=kCustom, calls=%start
  ROOT %f = f32[4]{0} fusion(%x), kind=kCustom, calls=%overlap
}
"""  # noqa: E501


def test_a_collective_in_several_fusions_of_a_tpu_counts_once() -> None:
    gather = only(CHAIN)
    assert (gather.kind, gather.count, gather.is_async) == ("all-gather", 1, True)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={}, x=1", ()),
        ("x=1", ()),
        ("replica_groups=[2,4]<=[8], x=1", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (
            "replica_groups=[2,4]<=[2,2,2]T(1,0,2)",
            ((0, 1, 4, 5), (2, 3, 6, 7)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}",
            ((0, 2), (1, 3)),
        ),
        (
            "replica_groups=mesh['a'=8] {'a':(2)2}",
            ((0, 2), (1, 3), (4, 6), (5, 7)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
    ],
)
def test_notations_of_groups(text: str, groups: Any) -> None:
    assert replica_groups(text) == groups


def test_unknown_notations_are_errors() -> None:
    with pytest.raises(InternalError, match=r"unknown notation.*mesh"):
        replica_groups("replica_groups=mesh['x'=2]")
    with pytest.raises(InternalError, match="no source_target_pairs"):
        source_target_groups("channel_id=1")
    with pytest.raises(InternalError, match="no entry computation"):
        read_program("HloModule nothing")
