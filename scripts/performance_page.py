"""Put the last measurements into docs/performance.md and README.md.

    python scripts/performance_page.py

`benchmarks/results/raw` has them, as `make bench` wrote them.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from bench.entries import LAYOUTS  # noqa: E402
from bench.tables import headline, machines, summary  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


def blocks() -> dict[Path, list[str]]:
    """The lines that each page has between its marks."""
    groups = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("raw/*"))]
    short = headline(groups)
    return {
        ROOT / "README.md": short,
        ROOT / "docs" / "performance.md": [
            *machines(groups),
            "",
            *short,
            "",
            *summary(groups),
            *pictures(),
        ],
    }


def pictures() -> list[str]:
    """The pictures that there are, in the order of the tables."""
    titles = {
        f"step_time_{layout}.png": f"Step times: {title}"
        for layout, title in LAYOUTS.items()
    }
    titles["scaling.png"] = "From one process to two"
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
