"""Measurements as Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.accelerators import peak_flops
from bench.entries import LAYOUTS, Layout
from bench.targets import Figure, figures, ratio_of

__all__ = [
    "disagreeing",
    "gpu_steps",
    "headline",
    "machines",
    "markdown",
    "summary",
]

_REFERENCE, _OURS = "bare JAX", "replicax fit"
_TUNED = f"{_OURS}, tuned"
_PLACES: dict[Layout, str] = {
    "one": "one device",
    "logical": "two devices",
    "processes": "two processes",
    "gpu": "one GPU",
}
_MODELS = {
    "a": "MLP",
    "b": "MNIST CNN",
    "c": "ResNet-18",
    "d": "MobileNetV2",
    "e": "transformer",
    "f": "tiny model",
    "g": "ResNet-50",
    "h": "transformer",
    "i": "LSTM",
    "j": "U-Net",
}
# Sums in another order, and Adam of another library, whose epsilon stands elsewhere.
_LOSSES = {"float32": (1e-3, 2e-2), "bfloat16": (1e-2, 5e-2)}


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
        "process takes at most above what it had after its imports; a GPU's is all "
        "that was ever in use at once, trials of the compiler included. Utilisation is "
        "the model's operations per second of what the GPU's data sheet promises.",
        "",
        *machines(groups),
        "",
        "## In short",
        "",
        *summary(groups),
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


def disagreeing(group: Mapping[str, Any]) -> dict[str, str]:
    """Entries whose first losses are not the reference's, and how far they are off."""
    entries = group["entries"]
    expected = entries[_REFERENCE]["losses"]
    first, later = _LOSSES[group.get("dtype", "float32")]
    found = {}
    for name, entry in entries.items():
        losses = entry["losses"]
        off = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
        if not (off[0] <= first and max(off) <= later):
            found[name] = f"first loss off by {off[0]:.2g}, third by {off[-1]:.2g}"
    return found


def headline(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of how many times faster `fit` is than other libraries on a CPU.

    Where another library is faster, a sentence below the table says so.

    Args:
        groups: What `measure` returned, in any order.
    """
    rows: dict[str, dict[str, str]] = {}
    slower: dict[str, list[Figure]] = {}
    for figure in figures(groups):
        peer = figure.target.title.removeprefix("times faster than ")
        layout, ratio = figure.target.layout, figure.ratio[0]
        if figure.ours != _OURS or peer == figure.target.title or layout == "gpu":
            continue
        row = rows.setdefault(f"{peer}, {_PLACES[layout]}", {})
        # Of nearly equal ones, which is faster.
        row[figure.case] = f"{ratio:.2f}" if ratio < 1.1 else f"{ratio:.1f}"
        if round(ratio, 2) < 1:
            row[figure.case] = "slower"
            slower.setdefault(peer, []).append(figure)
    cases = sorted({case for row in rows.values() for case in row})
    columns = ["times faster than", *(f"({case}) {_MODELS[case]}" for case in cases)]
    table = _table(
        columns, [[row, *(rows[row].get(case, "") for case in cases)] for row in rows]
    )
    notes = [_slower(peer, missed, groups) for peer, missed in slower.items()]
    return [*table, *(["", *notes] if notes else [])]


def _slower(
    peer: str, missed: Sequence[Figure], groups: Sequence[Mapping[str, Any]]
) -> str:
    """What a faster library takes, also beside `fit` with the process' settings."""
    shares = [f"{figure.ratio[0]:.2f} ({figure.case})" for figure in missed]
    tuned = []
    for figure in missed:
        for group in groups:
            entries = group["entries"]
            place = group["case"], group["layout"]
            if place == (figure.case, figure.target.layout) and _TUNED in entries:
                pair = (entries[name]["seconds"] for name in (figure.theirs, _TUNED))
                tuned.append(f"{ratio_of(*pair)[0]:.2f} ({figure.case})")
    text = f"{peer} takes {', '.join(shares)} times as long as `fit`"
    if tuned:
        text += f", and with `REPLICAX_CPU=tuned` {', '.join(tuned)} times"
    return text + "."


def gpu_steps(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of the milliseconds that steps take on one GPU.

    Args:
        groups: What `measure` returned, in any order.
    """
    chosen = sorted(
        (group for group in groups if group["layout"] == "gpu"),
        key=lambda group: group["case"],
    )
    names = [name for name in chosen[0]["entries"] if "steps" not in name]
    return _table(
        ["milliseconds a step", *names],
        [
            [
                f"{_MODELS[group['case']]}, {group['batch']} examples",
                *(
                    f"{1000 * statistics.median(group['entries'][name]['seconds']):.1f}"
                    for name in names
                ),
            ]
            for group in chosen
        ],
    )


def summary(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Step times of all entries as tables of multiples of ours, one for each layout.

    Args:
        groups: What `measure` returned, in any order.
    """
    return [
        f"How many times as long as `{_OURS}` a step takes, beside it in turns.",
        *(line for layout in LAYOUTS for line in _summary(groups, layout)),
    ]


def _summary(groups: Sequence[Mapping[str, Any]], layout: Layout) -> list[str]:
    """A row for each entry, a column for each case."""
    chosen = {
        group["case"]: group["entries"]
        for group in groups
        if group["layout"] == layout and _OURS in group["entries"]
    }
    names = dict.fromkeys(
        name for entries in chosen.values() for name in entries if name != _OURS
    )
    if not chosen:
        return []
    rows = []
    for name in names:
        ratios = [
            f"{ratio_of(entries[name]['seconds'], entries[_OURS]['seconds'])[0]:.2f}"
            if name in entries
            else ""
            for entries in chosen.values()
        ]
        rows.append([name, *ratios])
    columns = [LAYOUTS[layout], *(f"({case})" for case in chosen)]
    return ["", *_table(columns, rows)]


def machines(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Where and with what they were measured, as items of a list.

    Args:
        groups: What `measure` returned.
    """
    dates: dict[str, set[str]] = {}
    for group in groups:
        machine = group["machine"]
        line = (
            f"{machine['processor']}, {machine['cores']} cores, "
            f"{machine['system']}{_gpu(group)}; {_versions(group)}"
        )
        dates.setdefault(line, set()).add(group["date"])
    return [f"- {line}; {', '.join(sorted(dates[line]))}" for line in sorted(dates)]


def _gpu(group: Mapping[str, Any]) -> str:
    name = group["machine"].get("gpu")
    return f", {name}" if name else ""


def _versions(group: Mapping[str, Any]) -> str:
    merged: dict[str, str] = {}
    for environment, versions in group["versions"].items():
        for name, version in versions.items():
            # TensorFlow's environment has its own Keras.
            unlike = merged.get(name, version) != version
            merged[f"{name} ({environment})" if unlike else name] = version
    python = group["machine"]["python"]
    return f"Python {python}, " + ", ".join(
        f"{k} {v}" for k, v in sorted(merged.items())
    )


def _target_lines(found: Sequence[Figure]) -> list[str]:
    columns = ["target", "case", "ours", "beside", "bound", "measured", "met"]
    rows = [
        [
            figure.target.title,
            figure.case,
            figure.ours,
            figure.theirs,
            f"{'≤' if figure.target.at_most else '≥'} "
            f"{figure.target.cases[figure.case]}",
            _ratio(figure.ratio),
            "yes" if figure.is_met else "**no**",
        ]
        for figure in found
    ]
    return _table(columns, rows)


def _ratio(ratio: tuple[float, float, float]) -> str:
    middle, low, high = ratio
    if low == high:
        return f"{middle:.2f}"
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _group_lines(group: Mapping[str, Any]) -> list[str]:
    reference = group["entries"][_REFERENCE]
    rows = [
        {
            "entry": name,
            "ms per step": f"{1000 * statistics.median(entry['seconds']):.4g}",
            "of bare JAX": _ratio(ratio_of(entry["seconds"], reference["seconds"])),
            **_throughput(group, entry),
            "first step s": f"{_median(entry['first_step_seconds']):.1f}",
            **_memory(group, entry),
            "loss": f"{entry['losses'][-1]:.4f}",
        }
        for name, entry in group["entries"].items()
    ]
    lines = [
        f"### ({group['case']}) {group['title']}, global batch {group['batch']}",
        "",
        f"{_rounds(group)} of {group['steps']} steps.",
        "",
        *_table(list(rows[0]), [list(row.values()) for row in rows]),
    ]
    for name, off in disagreeing(group).items():
        lines += ["", f"{name} computes something else: {off}."]
    for name, reason in group["left_out"].items():
        lines += ["", f"Left out: {name} ({reason})"]
    return lines


def _rounds(group: Mapping[str, Any]) -> str:
    rounds = f"{group['rounds']} rounds"
    starts = group.get("starts", 1)
    return rounds if starts == 1 else f"{starts} starts with {rounds} each"


def _median(values: float | Sequence[float]) -> float:
    """Of one value a start; of the one value in files with one start."""
    return statistics.median(values) if isinstance(values, Sequence) else values


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _throughput(group: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, str]:
    """Columns of a GPU: examples per second, and how much of its power is used."""
    if group["layout"] != "gpu":
        return {}
    seconds = statistics.median(entry["seconds"])
    peak, flops = peak_flops(group["machine"].get("gpu")), group["flops"]
    used = f"{100 * flops / seconds / peak:.1f} %" if peak and flops else ""
    return {
        f"{group['unit']}/s": f"{group['units'] / seconds:.0f}",
        "utilisation": used,
    }


def _memory(group: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, str]:
    if group["layout"] == "gpu":
        return {"GPU memory MB": f"{_median(entry['device_bytes']) / 1e6:.0f}"}
    return {"memory MB": f"{_median(entry['memory_bytes']) / 1e6:.0f}"}
