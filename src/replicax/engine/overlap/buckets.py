"""Divides gradients into buckets, each summed over the replicas as one array.

A bucket is summed while the backward pass computes the gradients of the next bucket. So
buckets follow the order in which the backward pass computes the gradients. The last
bucket is small, because no computation is left to hide its sum.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from replicax._util.types import PyTree
from replicax.engine.overlap.origins import Origin, path_to_product
from replicax.engine.replica_axis import ReplicaAxis, join, part

__all__ = [
    "bucket_blocks",
    "bucket_sums",
    "bytes_of_bucket",
    "made_meanwhile",
    "overlapping_buckets",
    "plan_buckets",
]

# Sizes of a bucket. Smaller ones do not fill a link, larger ones start late; between
# hosts a sum takes longer to start.
_LEAST_BYTES = 2**20
_LEAST_BYTES_ACROSS_HOSTS = 2**22
_MOST_BYTES = 2**25
_NUM_PACKS = 8  # Where that gives sizes between those.
_NUM_PUT_OFF = 2  # Products that are left to be made while a bucket is scattered.
_LAST_SHARE = 32  # The last bucket has at most that part of all bytes.


def plan_buckets(
    sizes: Sequence[int],
    dtypes: Sequence[DTypeLike],
    *,
    bytes_per_pack: int = 0,
    num_packs: int = 0,
) -> list[list[int]] | None:
    """Plan which gradients are summed together, as lists of their positions.

    The last come first, since the backward pass has the last layers' gradients first.
    A bucket has one dtype. Empty gradients are in none. None: no packing is asked for.

    Args:
        sizes: The gradients' sizes in bytes.
        dtypes: Their dtypes.
        bytes_per_pack: The most bytes in a bucket; a larger gradient is alone.
        num_packs: Without `bytes_per_pack`: split all into about that many buckets of
            like size, one more for each further dtype in them.

    Example:
        >>> plan_buckets([4, 4, 40, 4], ["float32"] * 4, bytes_per_pack=16)
        [[3], [2], [1, 0]]
    """
    if bytes_per_pack == 0 and num_packs < 2:
        return None
    order = [i for i in reversed(range(len(sizes))) if sizes[i]]
    if bytes_per_pack:
        return _filled(order, sizes, dtypes, itertools.repeat(bytes_per_pack))
    total, before = sum(sizes), 0
    buckets: dict[tuple[DTypeLike, int], list[int]] = {}
    for i in order:
        # By the gradient's middle, so that no bucket is far from its share.
        share = (2 * before + sizes[i]) * num_packs // (2 * total)
        buckets.setdefault((dtypes[i], share), []).append(i)
        before += sizes[i]
    return list(buckets.values())


def bytes_of_bucket(total: int, *, spans_hosts: bool = False) -> int:
    """The size of buckets of so many bytes in all, whose sums are to overlap."""
    least = _LEAST_BYTES_ACROSS_HOSTS if spans_hosts else _LEAST_BYTES
    return min(max(total // _NUM_PACKS, least), _MOST_BYTES)


def overlapping_buckets(
    sizes: Sequence[int],
    dtypes: Sequence[DTypeLike],
    origins: Sequence[Origin],
    *,
    spans_hosts: bool = False,
) -> tuple[list[list[int]] | None, dict[int, int]]:
    """Buckets whose sums travel while the backward pass still computes.

    They follow each other as the backward pass has the gradients. The first ones are
    small, so that the link has work early. Nothing hides the last sum, so its bucket is
    as small as can be; where the backward pass ends with large gradients, such as those
    of embeddings, it has products from before.

    XLA makes products and starts sums as late as it thinks that it can. So that one
    product is left to be made while a bucket travels, the last one of each is put off
    until the sum before that is there.

    Returns:
        The buckets, as `plan_buckets` does; None where the gradients are too small for
        more than one. And for each gradient that is put off, by position: the number of
        the bucket whose sum it waits for.
    """
    total = sum(sizes)
    most = bytes_of_bucket(total, spans_hosts=spans_hosts)
    if total <= most:
        return None, {}
    order = [i for i in reversed(range(len(sizes))) if sizes[i]]
    order.sort(key=lambda i: origins[i].depth)
    last = _last_bucket(order, sizes, origins, total // _LAST_SHARE)
    # What is there at the end only must not keep back what is there before.
    end = origins[order[-1]].depth
    before = [i for i in order if i not in last and origins[i].depth < end]
    late = [i for i in order if i not in last and origins[i].depth == end]
    limits = itertools.chain((most // 4, most // 2), itertools.repeat(most))
    buckets = [
        *_filled(before, sizes, dtypes, limits, may_exceed=True),
        *_filled(late, sizes, dtypes, limits, may_exceed=True),
        *_filled(last, sizes, dtypes, itertools.repeat(total)),
    ]
    put_off = {}
    for number, bucket in enumerate(buckets[2:]):
        products = [i for i in bucket if origins[i].product]
        put_off |= dict.fromkeys(products[-1:], number)
    return buckets, put_off


def _last_bucket(
    order: Sequence[int], sizes: Sequence[int], origins: Sequence[Origin], most: int
) -> list[int]:
    """The gradients that go last: the latest products, of at most that many bytes.

    With them go those that the backward pass has even later, unless some are larger.
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
    sizes: Sequence[int],
    dtypes: Sequence[DTypeLike],
    limits: Iterator[int],
    *,
    may_exceed: bool = False,
) -> list[list[int]]:
    """Gradients in buckets of one dtype, each filled up to the next one of the limits.

    With `may_exceed` up to the first gradient that reaches it.
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


def bucket_sums(
    grads: Sequence[jax.Array],
    buckets: Iterable[Sequence[int]],
    reduced: Callable[[list[jax.Array]], list[jax.Array]],
    axis: ReplicaAxis,
    *,
    put_off: Mapping[int, int],
    weights: Mapping[int, jax.Array],
) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """Sum the gradients, one bucket after another, with `reduced`.

    For `put_off` see `overlapping_buckets`. The updates of `weights`, by position, must
    not be made together with something that the backward pass needs: those returned
    wait for their sums.
    """
    waiting: dict[int, jax.Array] = dict(weights)
    sums = dict(enumerate(grads))  # Empty gradients are their own sums.
    totals: list[jax.Array] = []
    for bucket in buckets:
        arrays = [
            _made_after(grads[i], totals[put_off[i]]) if i in put_off else grads[i]
            for i in bucket
        ]
        joined = join(arrays)
        if totals:
            joined = _after(joined, totals[-1], axis)
        (total,) = reduced([joined])
        totals.append(total)
        held = {i: weights[i] for i in bucket if i in weights}
        if held:
            *own, total = lax.optimization_barrier((*held.values(), total))
            waiting |= zip(held, own, strict=True)
        sums |= zip(bucket, part(total, arrays), strict=True)
    return list(sums.values()), waiting


def bucket_blocks(
    grads: Sequence[jax.Array],
    buckets: Sequence[Sequence[int]],
    scattered: Callable[[int, jax.Array], jax.Array],
    origins: Sequence[Origin],
    *,
    updates_are_last: bool = False,
) -> dict[int, jax.Array]:
    """Scatter the sums of gradients, one bucket after another: the blocks, by position.

    A bucket's gradients stay arrays of their own, which XLA scatters together: a
    replica's block of what `join` makes would be no block of each. `scattered` makes
    this replica's block of the sum of a gradient, of that position. Where updates are
    not last, gathers of new weights travel between buckets, and XLA chooses what is
    made meanwhile.
    """
    made = dict(enumerate(grads))
    blocks: dict[int, jax.Array] = {}
    before: list[jax.Array] = []  # What was there before the previous bucket travelled.
    previous: list[jax.Array] = []
    meanwhile = made_meanwhile(buckets, origins)
    for number, bucket in enumerate(buckets):
        late = [i for i, awaited in meanwhile.items() if awaited == number - 1]
        made |= {i: _made_after(grads[i], before) for i in late}
        before = previous or [made[i] for i in bucket]
        if previous:
            # With `updates_are_last` nothing else is to hide the previous bucket.
            waiting = [
                *bucket,
                *(i for i in late if updates_are_last and i not in bucket),
            ]
            own, _ = lax.optimization_barrier(([made[i] for i in waiting], previous))
            made |= zip(waiting, own, strict=True)
        previous = [scattered(i, made[i]) for i in bucket]
        blocks |= zip(bucket, previous, strict=True)
    return blocks


def made_meanwhile(
    buckets: Sequence[Sequence[int]], origins: Sequence[Origin]
) -> dict[int, int]:
    """For each deferred gradient, the number of the bucket that travels meanwhile.

    Each bucket hides behind two products of later buckets, if there are any: the second
    product serves the gathers of weights, which may travel as well.
    """
    left = [[i for i in bucket if origins[i].product] for bucket in buckets]
    meanwhile: dict[int, int] = {}
    for number in [*reversed(range(len(buckets) - 1))] * _NUM_PUT_OFF:
        products = next(filter(None, left[number + 1 :]), None)
        if products is not None:
            meanwhile[products.pop()] = number
    return meanwhile


def _made_after(grad: jax.Array, previous: PyTree) -> jax.Array:
    """Recompute a product from inputs that wait for `previous`.

    XLA drops the first one, which nothing uses then. It would make it long before: it
    takes the updates of weights for enough to hide the last sums.
    """
    *path, (product, _) = path_to_product(grad)
    *inputs, _ = lax.optimization_barrier((*product.in_tracers, previous))
    value = product.primitive.bind(*inputs, **product.params)
    for equation, number in reversed(path):
        inputs = list(equation.in_tracers)
        inputs[number] = value
        value = equation.primitive.bind(*inputs, **equation.params)
    return value


def _after(value: jax.Array, previous: jax.Array, axis: ReplicaAxis) -> jax.Array:
    """`value`, which XLA may not touch before `previous` is known.

    Sums that wait for each other cannot be merged into one, as XLA otherwise would, and
    go in this order.
    """
    value, previous = lax.optimization_barrier((value, previous))
    if not axis.is_of_cpus:
        return value
    # XLA drops barriers on CPUs before it merges. So the value has to depend on the
    # sum: by a condition that is never true, and that XLA does not see through.
    probe = previous[(0,) * previous.ndim]
    if not jnp.issubdtype(probe.dtype, jnp.inexact):
        probe = probe.astype(jnp.float32)
    never = jnp.isfinite(probe) & jnp.isnan(probe)
    return jnp.where(never, jnp.zeros_like(value), value)
