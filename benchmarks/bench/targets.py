"""What is to be reached, and whether the measurements reach it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.entries import Layout

__all__ = ["TARGETS", "Figure", "Target", "figures", "ratio_of"]


@dataclass(frozen=True)
class Target:
    """A bound on a ratio.

    Attributes:
        title: What is compared.
        layout: Where.
        cases: Letters of the cases, each with its bound.
        ours: Entries of ours; each has to reach it.
        theirs: The entry they are compared with; the fastest of several.
        at_most: Whether the bound is the largest allowed; else the smallest.
        value: "seconds", "first_step_seconds" or "memory_bytes".
        speedup: Whether the ratio is theirs to ours, as "times faster" has it.
    """

    title: str
    layout: Layout
    cases: Mapping[str, float]
    ours: Sequence[str]
    theirs: Sequence[str]
    at_most: bool = False
    value: str = "seconds"
    speedup: bool = True


_BOTH = ("replicax run", "replicax fit")
_TF = ("TF fit, tf_keras", "TF run, tf_keras", "TF fit, Keras 3")
_FIT8 = "replicax fit, 8 steps"
_FIT32 = "replicax fit, 32 steps"


def _all(bound: float, cases: str = "abcdefij") -> dict[str, float]:
    return dict.fromkeys(cases, bound)


def _bare(title: str, value: str, bound: float, cases: str) -> list[Target]:
    layouts: tuple[Layout, ...] = ("one", "logical", "processes")
    return [
        Target(
            f"{title} ({layout})",
            layout,
            _all(bound, cases),
            _BOTH,
            ["bare JAX"],
            at_most=True,
            value=value,
            speedup=False,
        )
        for layout in layouts
    ]


TARGETS = [
    *_bare("step time over bare JAX", "seconds", 1.03, "aei"),
    Target(
        "host overhead: fit over Keras' own fit, one device",
        "one",
        _all(1.0, "f"),
        ["replicax fit"],
        ["Keras fit"],
        at_most=True,
        speedup=False,
    ),
    Target(
        "fit, 32 steps per execution, times faster than Keras'",
        "one",
        _all(1.0, "f"),
        [_FIT32],
        ["Keras fit, 32 steps"],
    ),
    Target(
        "times faster than TF MirroredStrategy",
        "logical",
        _all(1.5),
        _BOTH,
        _TF,
    ),
    Target(
        "times faster than Keras DataParallel",
        "logical",
        _all(1.5),
        ["replicax fit"],
        ["Keras DataParallel fit"],
    ),
    Target(
        "times faster than TF MultiWorkerMirroredStrategy",
        "processes",
        _all(1.5),
        _BOTH,
        _TF,
    ),
    Target(
        "times faster than torch DDP",
        "processes",
        {**_all(1.1, "ae"), **_all(1.0, "bcfij"), **_all(0.9, "d")},
        _BOTH,
        ["torch DDP"],
    ),
    Target(
        "step time over bare JAX (gpu)",
        "gpu",
        _all(1.0204, "gh"),  # 0.98 of its speed.
        _BOTH,
        ["bare JAX"],
        at_most=True,
        speedup=False,
    ),
    Target(
        "times faster than torch (gpu)",
        "gpu",
        _all(1.0, "gh"),
        (*_BOTH, _FIT8),
        ["torch"],
    ),
    Target(
        "first step over Keras' own fit",
        "one",
        _all(1.25),
        _BOTH,
        ["Keras fit"],
        at_most=True,
        value="first_step_seconds",
        speedup=False,
    ),
    Target(
        "first step over Keras DataParallel",
        "logical",
        _all(1.25),
        _BOTH,
        ["Keras DataParallel fit"],
        at_most=True,
        value="first_step_seconds",
        speedup=False,
    ),
    *_bare("peak memory over bare JAX", "memory_bytes", 1.1, "abcdefij"),
]


@dataclass(frozen=True)
class Figure:
    """What was measured for a target in a case.

    Attributes:
        target: The target.
        case: The case's letter.
        ours: The entry.
        theirs: The entry it is compared with.
        ratio: The median of the rounds' ratios, lowest and highest.
        is_met: Whether the median is within the bound.
    """

    target: Target
    case: str
    ours: str
    theirs: str
    ratio: tuple[float, float, float]
    is_met: bool


def figures(groups: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The figures of all targets for which there are measurements.

    Args:
        groups: What `measure` returned, of one or several groups.
    """
    by_key = {(group["case"], group["layout"]): group for group in groups}
    found: list[Figure] = []
    for target in TARGETS:
        for case, bound in target.cases.items():
            group = by_key.get((case, target.layout))
            if group is None:
                continue
            entries = group["entries"]
            theirs = [name for name in target.theirs if name in entries]
            if not theirs:
                continue
            best = min(theirs, key=lambda n: _middle(entries[n], target.value))
            for ours in target.ours:
                if ours in entries:
                    ratio = _ratio(target, entries[ours], entries[best])
                    holds = ratio[0] <= bound if target.at_most else ratio[0] >= bound
                    found.append(Figure(target, case, ours, best, ratio, holds))
    return found


def ratio_of(
    ours: Sequence[float], theirs: Sequence[float]
) -> tuple[float, float, float]:
    """The median of the ratios of neighbours in time, the lowest and the highest."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ratios), ratios[0], ratios[-1]


def _middle(entry: Mapping[str, Any], value: str) -> float:
    return statistics.median(_values(entry, value))


def _values(entry: Mapping[str, Any], value: str) -> list[float]:
    found = entry[value]
    return found if isinstance(found, list) else [found]


def _ratio(
    target: Target, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> tuple[float, float, float]:
    a, b = _values(ours, target.value), _values(theirs, target.value)
    return ratio_of(b, a) if target.speedup else ratio_of(a, b)
