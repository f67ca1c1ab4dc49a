"""Divides gradients into buckets, and sums each bucket over the replicas.

A bucket is summed while the backward pass computes the gradients of the next bucket, so
buckets are in the order of the backward pass. The last one is small: nothing hides its
sum.

An all-reduce joins the gradients of a bucket to one array. For a reduce-scatter, which
gives a replica its block of each gradient, the gradients stay separate arrays.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from replicax.engine.overlap.origins import Origin, origins_of, path_to_product
from replicax.engine.replica_axis import ReplicaAxis, join, never, split

__all__ = [
    "SumPlan",
    "bytes_of_bucket",
    "deferred_products",
    "overlapping_buckets",
    "plan_sums",
    "sum_in_order",
]

# The size of a bucket. Sums of smaller buckets do not fill a link, and sums of larger
# ones start late. Between hosts, a sum has more latency.
_LEAST_BYTES = 2**20
_LEAST_BYTES_ACROSS_HOSTS = 2**22
_MOST_BYTES = 2**25
_NUM_BUCKETS = 8  # If these sizes allow.
_LAST_DIVISOR = 32  # The last bucket has at most 1/32 of all bytes.
_NUM_DEFERRED = 2  # Products that XLA computes while a bucket is scattered.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SumPlan:
    """Which gradients are summed together, in which order.

    Attributes:
        buckets: Positions of each bucket's gradients, in order; only empty gradients
            are in no bucket. Without buckets, all are summed in any order.
        deferred: For each gradient whose product XLA should compute late, the number of
            the bucket that is summed meanwhile.
        convolutions: Positions of the gradients of convolutions' kernels.
        scatters: Whether each replica gets its block of a sum, or the whole sum.
    """

    buckets: Sequence[Sequence[int]] = ()
    deferred: Mapping[int, int] = dataclasses.field(default_factory=dict)
    convolutions: frozenset[int] = frozenset()
    scatters: bool = False


def plan_sums(
    grads: Mapping[int, jax.Array],
    axis: ReplicaAxis,
    *,
    scatters: bool = False,
    may_overlap: bool = True,
    bytes_per_pack: int = 0,
    num_packs: int = 0,
) -> SumPlan:
    """Plan the buckets that the user sets, or else buckets that overlap on GPUs.

    Args:
        grads: The gradients by position, after compression.
        axis: The replicas.
        scatters: As in `SumPlan`.
        may_overlap: Whether to plan overlapping buckets without the user's settings.
        bytes_per_pack: Maximum size of a bucket; a larger gradient is alone. 0: unset.
        num_packs: Number of buckets, without `bytes_per_pack`; 0 or 1: unset.
    """
    sizes = {i: g.nbytes for i, g in reversed([*grads.items()]) if g.size}
    dtypes = {i: g.dtype for i, g in grads.items()}
    origins = origins_of(grads) if axis.overlaps else {}
    deferred: dict[int, int] = {}
    buckets: list[list[int]] = []
    if bytes_per_pack:
        buckets = _filled(sizes, sizes, dtypes, itertools.repeat(bytes_per_pack))
    elif num_packs > 1:
        limit = math.ceil(sum(sizes.values()) / num_packs)
        limits = itertools.repeat(limit)
        buckets = _filled(sizes, sizes, dtypes, limits, may_exceed=True)
    elif axis.overlaps and may_overlap:
        spans_hosts = axis.num_per_host < axis.size
        buckets = overlapping_buckets(sizes, dtypes, origins, spans_hosts=spans_hosts)
        deferred = deferred_products(buckets, origins, scatters=scatters)
    return SumPlan(
        buckets=buckets,
        deferred=deferred,
        convolutions=frozenset(i for i, x in origins.items() if x.is_convolution),
        scatters=scatters,
    )


def bytes_of_bucket(total: int, *, spans_hosts: bool = False) -> int:
    """The size of overlapping buckets for gradients of `total` bytes."""
    least = _LEAST_BYTES_ACROSS_HOSTS if spans_hosts else _LEAST_BYTES
    return min(max(total // _NUM_BUCKETS, least), _MOST_BYTES)


def overlapping_buckets(
    sizes: Mapping[int, int],
    dtypes: Mapping[int, DTypeLike],
    origins: Mapping[int, Origin],
    *,
    spans_hosts: bool = False,
) -> list[list[int]]:
    """Buckets in the order in which the backward pass computes the gradients.

    The first buckets are small, so that the link has work early. If the backward pass
    ends with large gradients, such as of embeddings, the last bucket has gradients that
    are computed earlier. Returns no buckets if all gradients fit into one.
    """
    total = sum(sizes.values())
    most = bytes_of_bucket(total, spans_hosts=spans_hosts)
    if total <= most:
        return []
    order = sorted(sizes, key=lambda i: origins[i].depth)
    last = _last_bucket(order, sizes, origins, total // _LAST_DIVISOR)
    # Earlier gradients must not wait for those at the end of the backward pass.
    end = origins[order[-1]].depth
    early = [i for i in order if i not in last and origins[i].depth < end]
    late = [i for i in order if i not in last and origins[i].depth == end]
    limits = itertools.chain((most // 4, most // 2), itertools.repeat(most))
    return [
        *_filled(early, sizes, dtypes, limits, may_exceed=True),
        *_filled(late, sizes, dtypes, limits, may_exceed=True),
        *_filled(last, sizes, dtypes, itertools.repeat(total)),
    ]


def _last_bucket(
    order: list[int], sizes: Mapping[int, int], origins: Mapping[int, Origin], most: int
) -> list[int]:
    """The last bucket: the latest gradients, of at most `most` bytes together.

    Once a gradient does not fit, only products are added.
    """
    last: list[int] = []
    depth = num_bytes = 0
    has_skipped = False
    for i in reversed(order):
        if origins[i].depth < depth:
            break
        if num_bytes + sizes[i] > most or (has_skipped and not origins[i].product):
            has_skipped = True
            continue
        last.append(i)
        num_bytes += sizes[i]
        if origins[i].product:
            depth = origins[i].depth
    return last[::-1]


def _filled(
    order: Iterable[int],
    sizes: Mapping[int, int],
    dtypes: Mapping[int, DTypeLike],
    limits: Iterator[int],
    *,
    may_exceed: bool = False,
) -> list[list[int]]:
    """Fill buckets of one dtype up to their limits, in order.

    With `may_exceed`, a bucket includes the gradient that exceeds its limit.
    """
    buckets: list[list[int]] = []
    room: dict[DTypeLike, tuple[list[int], int]] = {}  # The dtype's bucket, bytes left.
    for i in order:
        bucket, left = room.get(dtypes[i], ([], 0))
        fits = left > 0 if may_exceed else 0 < sizes[i] <= left
        if not fits:
            bucket, left = [], next(limits)
            buckets.append(bucket)
        bucket.append(i)
        room[dtypes[i]] = (bucket, left - sizes[i])
    return buckets


def deferred_products(
    buckets: Sequence[Sequence[int]], origins: Mapping[int, Origin], *, scatters: bool
) -> dict[int, int]:
    """The products that XLA should compute late, as `SumPlan.deferred`.

    XLA starts sums as late as possible. So one product of a bucket is deferred until
    the previous bucket is being summed. While a bucket is scattered, weights may be
    gathered as well, so two products of later buckets are deferred.
    """
    products = [[i for i in bucket if origins[i].product] for bucket in buckets]
    if not scatters:
        following = enumerate(products[2:], start=1)
        return {own[-1]: number for number, own in following if own}
    deferred: dict[int, int] = {}
    for number in [*reversed(range(len(buckets) - 1))] * _NUM_DEFERRED:
        later = next(filter(None, products[number + 1 :]), None)
        if later is not None:
            deferred[later.pop()] = number
    return deferred


def sum_in_order(
    grads: Mapping[int, jax.Array],
    plan: SumPlan,
    send: Callable[[Sequence[int], list[jax.Array]], list[jax.Array]],
    axis: ReplicaAxis,
    *,
    weights: list[jax.Array] | None = None,
    updates_are_last: bool = False,
) -> dict[int, jax.Array]:
    """Sum gradients as planned; `send` sums a bucket's arrays over the replicas.

    In `weights`, kernels of convolutions are replaced by equal values that wait for
    their gradients' sums. The backward pass needs the transposed kernel, and XLA would
    otherwise fuse the transpose with the update, and so delay it. For
    `updates_are_last` see `sum_gradients`.
    """
    computed, sums = dict(grads), dict[int, jax.Array]()
    before: list[jax.Array] = []  # Computed before the previous bucket's sum.
    previous: list[jax.Array] = []
    for number, bucket in enumerate(plan.buckets):
        late = [i for i, meanwhile in plan.deferred.items() if meanwhile == number - 1]
        computed |= {i: _computed_after(grads[i], before) for i in late}
        arrays = [computed[i] for i in bucket]
        before = previous or arrays
        sent = arrays if plan.scatters else [join(arrays)]
        if previous:
            # Otherwise gathers of weights follow, and XLA chooses the products itself.
            others = [i for i in late if i not in bucket] if updates_are_last else []
            sent = _after([*sent, *(computed[i] for i in others)], previous, axis)
            computed |= {i: sent.pop() for i in reversed(others)}
        previous = totals = send(bucket, sent)
        waiting = [i for i in bucket if i in plan.convolutions] if weights else []
        if weights and waiting:
            kernels = [weights[i] for i in waiting]
            kernels, totals = lax.optimization_barrier((kernels, totals))
            for i, kernel in zip(waiting, kernels, strict=True):
                weights[i] = kernel
        totals = totals if plan.scatters else split(totals[0], arrays)
        sums |= zip(bucket, totals, strict=True)
    rest = [i for i in grads if i not in sums]
    if rest and (plan.scatters or not plan.buckets):
        sums |= zip(rest, send(rest, [grads[i] for i in rest]), strict=True)
    return {**grads, **sums}  # Empty gradients are their own sums.


def _computed_after(grad: jax.Array, previous: list[jax.Array]) -> jax.Array:
    """Recompute a gradient's product from inputs that wait for `previous`.

    XLA drops the original product, which it would have computed long before.
    """
    *path, (product, _) = path_to_product(grad)
    *inputs, _ = lax.optimization_barrier((*product.in_tracers, previous))
    value = product.primitive.bind(*inputs, **product.params)
    for equation, number in reversed(path):
        inputs = list(equation.in_tracers)
        inputs[number] = value
        value = equation.primitive.bind(*inputs, **equation.params)
    return value


def _after(
    values: list[jax.Array], previous: list[jax.Array], axis: ReplicaAxis
) -> list[jax.Array]:
    """`values`, made to depend on `previous`, so that XLA does not merge their sums."""
    values, previous = lax.optimization_barrier((values, previous))
    if not axis.is_of_cpus:
        return values
    # On CPUs, XLA removes barriers before it merges sums. So the values depend on the
    # previous sum by a condition that is never true, which XLA cannot infer.
    condition = never(previous[0])
    return [jnp.where(condition, jnp.zeros_like(x), x) for x in values]
