"""The documentation is true: its samples run, its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# The most lines of a page that is read at once.
MOST_LINES = {
    "README.md": 200,
    "CHANGELOG.md": 120,
    "CONTRIBUTING.md": 80,
    "SECURITY.md": 60,
    "examples/README.md": 60,
}
# Each page is a program that imports JAX and Keras: of the others `make test-all`.
ALWAYS_RUN = {"README.md"}
TIMEOUT_S = 120

PREAMBLE = """
import replicax as rx
rx.set_logical_devices(2)
"""

_FENCE = re.compile(r"^```(python|diff) *(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^[+ ]|^-.*", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """The page's Python samples: first line number, words after `python`, code.

    Of a diff, the code is what it makes.
    """
    text = page.read_text(encoding="utf-8")
    return [
        (
            text.count("\n", 0, match.start(3)) + 1,
            match[2].strip(),
            _MARK.sub("", match[3]) if match[1] == "diff" else match[3],
        )
        for match in _FENCE.finditer(text)
    ]


def _sometimes(page: Path) -> Any:
    name = page_id(page)
    return pytest.param(
        page, id=name, marks=() if name in ALWAYS_RUN else pytest.mark.slow
    )


def script(page: Path) -> str:
    """All samples of a page as one program, whose errors name the page's lines."""
    parts = [PREAMBLE]
    for line, words, code in blocks(page):
        padded = "\n" * (line - 1) + code
        compile(padded, page_id(page), "exec")
        if "no-run" not in words:
            parts.append(f"exec(compile({padded!r}, {page_id(page)!r}, 'exec'))")
    return "\n".join(parts)


@pytest.mark.parametrize("page", [_sometimes(page) for page in PAGES])
def test_samples_run(page: Path, tmp_path: Path) -> None:
    if not blocks(page):
        return
    process = subprocess.run(
        [sys.executable, "-c", script(page)],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(("name", "limit"), MOST_LINES.items())
def test_a_page_stays_short(name: str, limit: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize(
    "page", sorted({*PAGES, *(ROOT / name for name in MOST_LINES)}), ids=page_id
)
def test_links_lead_to_files(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    missing = [
        link
        for link in links
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not missing


def test_every_example_is_in_the_gallery() -> None:
    gallery = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    shared = {"common.py", "data.py"}
    examples = {f.name for f in (ROOT / "examples").glob("*.[pi][yp]*")} - shared
    assert len(examples) > 10
    for name in examples:
        assert f"](../examples/{name})" in gallery
        assert re.search(
            rf"^(python|jupyter|replicax).* examples/{name}", gallery, re.M
        )
