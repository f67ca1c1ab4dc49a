"""Who takes part in a collective: the notations of XLA's text for groups of devices."""

import re

import numpy as np

from replicax.errors import InternalError

__all__ = ["Groups", "replica_groups", "slice_groups", "source_target_groups"]

Groups = tuple[tuple[int, ...], ...]

_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"')
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def replica_groups(attributes: str) -> Groups:
    """The groups that an instruction's attributes name; empty: all devices as one.

    Raises:
        InternalError: For a notation that is not known.

    Example:
        >>> from replicax.planning.groups import replica_groups
        >>> replica_groups("replica_groups={{0,1},{2,3}}")
        ((0, 1), (2, 3))
        >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)")
        ((0, 2), (1, 3))
    """
    if "replica_groups=" not in attributes:
        return ()
    if match := _IOTA.search(attributes):
        return _from_iota(_numbers(match[1]), _numbers(match[2]), match[3])
    match = _EXPLICIT.search(attributes)
    if match is None:
        raise InternalError(
            "plan: unknown notation for replica groups: "
            f"{attributes[attributes.index('replica_groups=') :][:80]!r}."
        )
    groups = re.findall(r"\{([\d,]*)\}", match[1])
    return tuple(tuple(_numbers(group)) for group in groups)


def source_target_groups(attributes: str) -> Groups:
    """The devices that send to each other, directly or over others.

    Example:
        >>> from replicax.planning.groups import source_target_groups
        >>> source_target_groups("source_target_pairs={{0,1},{1,0},{2,3}}")
        ((0, 1), (2, 3))
    """
    match = _PAIRS.search(attributes)
    if match is None:
        raise InternalError(f"plan: no source_target_pairs in {attributes[:80]!r}.")
    group_of: dict[int, set[int]] = {}
    for pair in re.findall(r"\{(\d+),(\d+)\}", match[1]):
        source, target = map(int, pair)
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


def slice_groups(attributes: str) -> Groups:
    """Chips at the same place of several slices, which exchange over the network.

    Example:
        >>> from replicax.planning.groups import slice_groups
        >>> slice_groups('_xla_megascale_target="{1,2}x{0:1}"')
        ((0, 2), (1, 3))
    """
    match = _SLICES.search(attributes)
    if match is None:
        raise InternalError(
            "plan: unknown notation for an exchange between slices: "
            f"{attributes[:200]!r}."
        )
    num_slices = len(_numbers(match[1]))
    first, last = int(match[2]), int(match[3])
    size = last - first + 1
    return tuple(tuple(i + k * size for k in range(num_slices)) for i in range(size))


def _from_iota(shape: list[int], reshape: list[int], order: str | None) -> Groups:
    """`[groups,size]<=[dims]T(order)`: 0, 1, 2, ... reshaped, transposed, cut."""
    ids = np.arange(np.prod(reshape)).reshape(reshape)
    if order is not None:
        ids = ids.transpose(_numbers(order))
    rows = ids.reshape(shape[0], -1) if len(shape) > 1 else ids.reshape(1, -1)
    return tuple(tuple(row) for row in rows.tolist())


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
