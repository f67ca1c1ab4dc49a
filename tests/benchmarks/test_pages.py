"""The pages show what was measured last."""

import runpy
from pathlib import Path

import pytest

PAGES = runpy.run_path(str(Path(__file__).parents[2] / "scripts/performance_page.py"))


@pytest.mark.parametrize("path", PAGES["blocks"](), ids=lambda path: path.name)
def test_a_page_has_the_last_tables_and_pictures(path: Path) -> None:
    lines = PAGES["blocks"]()[path]
    assert any(line.startswith("| times faster than |") for line in lines)
    text = path.read_text(encoding="utf-8")
    assert "\n".join(lines) in text, "run scripts/performance_page.py"
    assert PAGES["filled"](text, lines) == text
