"""Measurements as Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicax.bench.entries import LAYOUTS, Layout
from replicax.bench.targets import Figure, figures, ratio_of

__all__ = ["comparable", "disagreeing", "markdown"]

_REFERENCE, _OURS = "bare JAX", "replicax fit"
# Sums in another order, and Adam of another library, whose epsilon stands elsewhere.
_FIRST_LOSS, _LATER_LOSS = 1e-3, 2e-2


def markdown(groups: Sequence[Mapping[str, Any]]) -> str:
    """All groups as one page.

    Args:
        groups: What `measure` returned, in any order.
    """
    groups = sorted(groups, key=lambda g: (list(LAYOUTS).index(g["layout"]), g["case"]))
    lines = [
        "# Results",
        "",
        "Medians of rounds in which all entries of a table took turns; ratios are "
        "those of neighbours in time, with the lowest and the highest. The loss is "
        "that of the third step, from the same first weights. Memory is what a "
        "process takes at most above what it had after its imports.",
        "",
        *_machines(groups),
        "",
        "## In short",
        "",
        f"How many times as long as `{_OURS}` a step takes, beside it in turns.",
        *(line for layout in LAYOUTS for line in _summary(groups, layout)),
        "",
        "## Targets",
        "",
        *_target_lines(figures(groups)),
    ]
    for layout, title in LAYOUTS.items():
        chosen = [group for group in groups if group["layout"] == layout]
        if chosen:
            lines += ["", f"## {title[0].upper()}{title[1:]}"]
        for group in chosen:
            lines += ["", *_group_lines(group)]
    return "\n".join(lines) + "\n"


def comparable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Entries with the reference's batch and number of replicas, by name."""
    entries = group["entries"]
    replicas = entries[_REFERENCE]["replicas"]
    return {
        name: entry
        for name, entry in entries.items()
        if entry["batch_ratio"] == 1 and entry["replicas"] == replicas
    }


def disagreeing(group: Mapping[str, Any]) -> dict[str, str]:
    """Entries whose first losses are not the reference's, and how far they are off.

    Those with another batch are not compared, nor those with another number of
    replicas: batch normalisation takes the means of a replica's part.
    """
    entries = comparable(group)
    expected = entries[_REFERENCE]["losses"]
    found = {}
    for name, entry in entries.items():
        losses = entry["losses"]
        off = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
        if not (off[0] <= _FIRST_LOSS and max(off) <= _LATER_LOSS):
            found[name] = f"first loss off by {off[0]:.2g}, third by {off[-1]:.2g}"
    return found


def _summary(groups: Sequence[Mapping[str, Any]], layout: Layout) -> list[str]:
    """A row for each entry that does the same work, a column for each case."""
    chosen = {
        group["case"]: group["entries"]
        for group in groups
        if group["layout"] == layout and _OURS in group["entries"]
    }
    names = dict.fromkeys(
        name
        for entries in chosen.values()
        for name, entry in entries.items()
        if name != _OURS and entry["batch_ratio"] == 1
    )
    if not chosen:
        return []
    lines = [
        "",
        f"| {LAYOUTS[layout]} | " + " | ".join(f"({case})" for case in chosen) + " |",
        "|---|" + "---|" * len(chosen),
    ]
    for name in names:
        ratios = [
            f"{ratio_of(entries[name]['seconds'], entries[_OURS]['seconds'])[0]:.2f}"
            if name in entries
            else ""
            for entries in chosen.values()
        ]
        lines.append(f"| {name} | " + " | ".join(ratios) + " |")
    return lines


def _machines(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    found = {
        (
            f"{group['machine']['processor']}, {group['machine']['cores']} cores, "
            f"{group['machine']['system']}; {_versions(group)}; {group['date']}"
        )
        for group in groups
    }
    return [f"- {line}" for line in sorted(found)]


def _versions(group: Mapping[str, Any]) -> str:
    merged: dict[str, str] = {}
    for environment, versions in group["versions"].items():
        for name, version in versions.items():
            # TensorFlow's environment has its own Keras.
            unlike = merged.get(name, version) != version
            merged[f"{name} ({environment})" if unlike else name] = version
    python = group["machine"]["python"]
    return f"Python {python}, " + ", ".join(f"{k} {v}" for k, v in merged.items())


def _target_lines(found: Sequence[Figure]) -> list[str]:
    lines = [
        "| target | case | ours | beside | bound | measured | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for figure in found:
        target = figure.target
        sign = "≤" if target.at_most else "≥"
        lines.append(
            f"| {target.title} | {figure.case} | {figure.ours} | {figure.theirs} | "
            f"{sign} {target.cases[figure.case]} | {_ratio(figure.ratio)} | "
            f"{'yes' if figure.is_met else '**no**'} |"
        )
    return lines


def _ratio(ratio: tuple[float, float, float]) -> str:
    middle, low, high = ratio
    if low == high:
        return f"{middle:.2f}"
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _group_lines(group: Mapping[str, Any]) -> list[str]:
    reference = group["entries"][_REFERENCE]
    lines = [
        f"### ({group['case']}) {group['title']}, global batch {group['batch']}",
        "",
        f"{group['rounds']} rounds of {group['steps']} steps.",
        "",
        "| entry | ms per step | of bare JAX | first step s | memory MB | loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in group["entries"].items():
        ratio = _ratio(ratio_of(entry["seconds"], reference["seconds"]))
        lines.append(
            f"| {name} | {1000 * statistics.median(entry['seconds']):.4g} | {ratio} | "
            f"{entry['first_step_seconds']:.1f} | {entry['memory_bytes'] / 1e6:.0f} | "
            f"{entry['losses'][-1]:.4f} |"
        )
    for name, off in disagreeing(group).items():
        lines += ["", f"{name} computes something else: {off}."]
    for name, reason in group["left_out"].items():
        lines += ["", f"Left out: {name} ({reason})"]
    return lines
