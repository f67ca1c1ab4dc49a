"""Put the last measurements into docs/performance.md and README.md.

    python scripts/performance_page.py

`benchmarks/results/raw` has them, copied from where `make bench` wrote them, and
`benchmarks/results/gpu_programs.json`, from `benchmarks/gpu_programs.py`.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from bench.entries import LAYOUTS  # noqa: E402
from bench.tables import gpu_steps, headline  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


def blocks() -> dict[Path, list[str]]:
    """The lines that each page has between its marks."""
    groups = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("raw/*"))]
    return {
        ROOT / "README.md": [*gpu_steps(groups), "", *headline(groups)],
        ROOT / "docs" / "performance.md": [
            *headline(groups),
            *pictures(),
            "",
            *gpu_programs(),
        ],
    }


def gpu_programs() -> list[str]:
    """Programs for GPUs: ours over those written by hand."""
    found = json.loads((RESULTS / "gpu_programs.json").read_text())
    lines = [
        "Programs for 8 H100, compiled and never run: replicax' over the one written "
        "by hand.",
        "",
        "| case | kernels | ratio | bytes moved, ratio | temporaries, MiB | ratio "
        "| all-reduces | their bytes, ratio | MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, programs in sorted(found["cases"].items()):
        ours, other = programs["replicax"], programs["by hand"]

        def ratio(what: str, ours: dict = ours, other: dict = other) -> str:
            return f"{ours[what] / other[what]:.2f}"

        cells = (
            f"({key})",
            f"{ours['kernels']} / {other['kernels']}",
            ratio("kernels"),
            ratio("bytes"),
            f"{ours['temporaries'] / 2**20:.1f} / {other['temporaries'] / 2**20:.1f}",
            ratio("temporaries"),
            f"{ours['collectives']} / {other['collectives']}",
            ratio("sent"),
            f"{ours['sent'] / 2**20:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def pictures() -> list[str]:
    """The pictures that there are, in the order of the tables."""
    titles = {
        f"step_time_{layout}.png": f"Step times: {title}"
        for layout, title in LAYOUTS.items()
    }
    return [
        line
        for name, title in titles.items()
        if (RESULTS / name).exists()
        for line in ("", f"![{title}](../benchmarks/results/{name})")
    ]


def filled(page: str, lines: Sequence[str]) -> str:
    """The page with these lines between its marks."""
    block = "\n".join(["<!-- measured -->", "", *lines, "", "<!-- /measured -->"])
    return re.sub(
        "<!-- measured -->.*<!-- /measured -->", lambda _: block, page, flags=re.DOTALL
    )


if __name__ == "__main__":
    for path, lines in blocks().items():
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text, lines), encoding="utf-8")
