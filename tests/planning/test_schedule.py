"""Schedules of GPU programs, whose FLOPs, bytes and times are known by hand."""

import dataclasses

import pytest

from replicax.planning.rates import Rates
from replicax.planning.schedule import Done, Kernel, Schedule, Start, WhileLoop
from replicax.planning.schedule import read_schedule as read

# A second for each FLOP in bfloat16 and for each byte; two for a float32 product.
RATES = Rates(
    peak_flops=1.0,
    memory_bytes=None,
    memory_bandwidth=1.0,
    ring_bandwidth=1.0,
    source="",
    flops_by_type={"f32": 0.5},
    elementwise_flops=0.1,
)

PROGRAM = """HloModule jit_step, is_scheduled=true
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
%gemm (p0: bf16[4,8], p1: bf16[8,2]) -> bf16[4,2] {
  %p0 = bf16[4,8]{1,0} parameter(0)
  %p1 = bf16[8,2]{1,0} parameter(1)
  ROOT %dot = bf16[4,2]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%fused_rows (p2: f32[100,4], p3: s32[]) -> f32[1,4] {
  %p2 = f32[100,4]{1,0} parameter(0)
  %p3 = s32[] parameter(1)
  %cut = f32[1,4]{1,0} dynamic-slice(%p2, %p3, %p3), dynamic_slice_sizes={1,4}
  ROOT %twice = f32[1,4]{1,0} add(%cut, %cut)
}
%fused_update (p4: f32[100,4], p5: f32[1,4], p6: s32[]) -> f32[100,4] {
  %p4 = f32[100,4]{1,0} parameter(0)
  %p5 = f32[1,4]{1,0} parameter(1)
  %p6 = s32[] parameter(2)
  ROOT %put = f32[100,4]{1,0} dynamic-update-slice(%p4, %p5, %p6, %p6)
}
%scatter (p7: f32[8]) -> f32[2] {
  %p7 = f32[8]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%p7), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}
ENTRY %main (x: bf16[4,8], w: bf16[8,2], rows: f32[100,4], i: s32[], g: f32[8]) -> f32[] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = bf16[8,2]{1,0} parameter(1)
  %rows = f32[100,4]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %g = f32[8]{0} parameter(4)
  %all-reduce-start = f32[8]{0} all-reduce-start(%g), replica_groups={{0,1,2,3}}, to_apply=%add
  %y = bf16[4,2]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %rs-start = ((f32[8]{0}), f32[2]{0}) async-start(%all-reduce-done), calls=%scatter
  %row = f32[1,4]{1,0} fusion(%rows, %i), kind=kLoop, calls=%fused_rows
  %rs-done = f32[2]{0} async-done(%rs-start)
  %new = f32[100,4]{1,0} fusion(%rows, %row, %i), kind=kLoop, calls=%fused_update
  %conv = (f32[2,6,6,5]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  ROOT %out = f32[] get-tuple-element(%conv), index=0
}
"""  # noqa: E501


def test_kernels_and_collectives_in_their_order() -> None:
    parts = read(PROGRAM).parts
    kinds = [type(part) for part in parts]
    begins = [Start, Kernel, Done, Start, Kernel, Done, Kernel, Kernel]
    assert kinds == begins
    sums, product, _, scatter, row, _, update, _ = parts
    assert isinstance(sums, Start)
    assert isinstance(scatter, Start)
    assert (sums.collective.kind, sums.collective.bytes) == ("all-reduce", 32)
    assert (scatter.collective.kind, scatter.collective.bytes) == ("reduce-scatter", 32)
    # Products count in their type, all bytes that come and go.
    assert isinstance(product, Kernel)
    assert product.products == {"bf16": 2 * 4 * 2 * 8}
    assert product.bytes == 2 * (4 * 8 + 8 * 2 + 4 * 2)
    # Of the hundred rows one is read, or written.
    assert isinstance(row, Kernel)
    assert (row.elementwise, row.bytes) == (4, 16 + 4 + 16)
    assert isinstance(update, Kernel)
    assert update.bytes == 16 + 16 + 4


LIBRARY = """HloModule jit_step
ENTRY %main (x: bf16[2,8,8,3], w: bf16[5,3,3,3], dy: bf16[2,6,6,5]) -> f32[] {
  %x = bf16[2,8,8,3]{3,2,1,0} parameter(0)
  %w = bf16[5,3,3,3]{3,2,1,0} parameter(1)
  %dy = bf16[2,6,6,5]{3,2,1,0} parameter(2)
  %forward = (bf16[2,6,6,5]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %input = (bf16[2,8,8,3]{3,2,1,0}, u8[0]{0}) custom-call(%dy, %w), dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %filter = (bf16[5,3,3,3]{3,2,1,0}, u8[0]{0}) custom-call(%x, %dy), dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %rows = f32[4,8]{1,0} bitcast(%x)
  %gemm = (f32[4,2]{1,0}, s8[4]{0}) custom-call(%rows, %w), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %other = f32[4]{0} custom-call(%rows), custom_call_target="mine"
  ROOT %out = f32[] constant(0)
}
"""  # noqa: E501


def test_calls_of_libraries() -> None:
    kernels = [kernel for kernel, _ in read(LIBRARY).kernels()]
    convolution = {"bf16": 2 * (2 * 6 * 6 * 5) * (3 * 3 * 3)}
    product = {"f32": 2 * 4 * 2 * 8}
    found = [kernel.products for kernel in kernels]
    assert found == [convolution, convolution, convolution, product, {}]


ATTENTION = """HloModule jit_step
ENTRY %main (q: bf16[2,8,4,16], k: bf16[2,6,4,16], stats: f32[2,4,8]) -> f32[] {
  %q = bf16[2,8,4,16]{3,2,1,0} parameter(0)
  %k = bf16[2,6,4,16]{3,2,1,0} parameter(1)
  %stats = f32[2,4,8]{2,1,0} parameter(2)
  %forward = (bf16[2,4,8,16]{3,1,2,0}, f32[2,4,8]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax"
  %backward = (bf16[2,4,8,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k, %stats, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %out = f32[] constant(0)
}
"""  # noqa: E501


def test_attention_by_cudnn() -> None:
    """Of 2 examples, 4 heads, 8 queries and 6 keys of 16 numbers."""
    once = 2 * (2 * 4 * 8 * 6 * 16)
    found = [kernel.products for kernel, _ in read(ATTENTION).kernels()]
    assert found == [{"bf16": 2 * once}, {"bf16": 5 * once}]


LOOP = """HloModule jit_step
%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%s), index=1
  %y = f32[4]{0} copy(%x)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %y)
}
%more (s: (s32[], f32[4])) -> pred[] {
  %s = (s32[], f32[4]{0}) parameter(0)
  ROOT %p = pred[] constant(true)
}
ENTRY %main (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = (s32[], f32[4]{0}) parameter(0)
  ROOT %w = (s32[], f32[4]{0}) while(%a), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"7"}}
}
"""  # noqa: E501


def test_loops_count_all_iterations() -> None:
    ((kernel, times),) = read(LOOP).kernels()
    assert (kernel.bytes, times) == (32, 7)
    assert read(LOOP).seconds(RATES, lambda _: 0.0) == (7 * 32, 0)


def kernel(seconds: float) -> Kernel:
    return Kernel(products={}, elementwise=0, bytes=seconds)


def test_a_kernel_runs_at_attained_rates() -> None:
    """Half of the bandwidth, a quarter of the FLOP/s, and a launch beside the work."""
    rates = dataclasses.replace(
        RATES, attained_bandwidth=0.5, attained_flops=0.25, kernel_seconds=100.0
    )
    assert kernel(3).seconds(rates) == 100 + 3 / 0.5
    product = Kernel(products={"bf16": 3}, elementwise=0, bytes=1)
    assert product.seconds(rates) == 100 + 3 / 0.25


def test_a_kernel_takes_the_longer_of_its_two_parts() -> None:
    work = Kernel(products={"bf16": 3.0, "f32": 1.0}, elementwise=0.2, bytes=6.0)
    assert work.flops == 4.2
    assert work.compute_seconds(RATES) == pytest.approx(3 + 2 + 2)
    assert work.seconds(RATES) == pytest.approx(7)


SUM, _, *_ = read(PROGRAM).parts
assert isinstance(SUM, Start)
ONE, TWO = Start("one", SUM.collective), Start("two", SUM.collective)


@pytest.mark.parametrize(
    ("parts", "exposed"),
    [
        # Nothing between start and done: all of it.
        ((kernel(5), ONE, Done("one"), kernel(5)), 10),
        # As long as the kernels in between: none.
        ((ONE, kernel(10), Done("one")), 0),
        # What is left when they are over.
        ((ONE, kernel(4), Done("one"), kernel(20)), 6),
        # One after another, however early they begin.
        ((ONE, TWO, kernel(12), Done("one"), Done("two")), 8),
        ((ONE, kernel(12), TWO, kernel(3), Done("one"), Done("two")), 7),
        # Nobody waits, but the step is over with the last of them.
        ((ONE, kernel(4)), 6),
        ((WhileLoop(3, (ONE, kernel(4), Done("one"))),), 18),
    ],
)
def test_communication_without_kernels_is_exposed(
    parts: tuple[Kernel | Start | Done | WhileLoop, ...], exposed: float
) -> None:
    busy, found = Schedule(parts).seconds(RATES, lambda _: 10.0)
    assert found == exposed
    assert busy == sum(k.bytes * times for k, times in Schedule(parts).kernels())
