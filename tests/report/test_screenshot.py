"""What a browser makes of the page, on a desk and on a phone; skipped without one."""

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest
from tests.report.test_page import epoch, fit

from replicax.report.page import page_of
from replicax.report.runs import Run, WorkerRecord

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
    None,
)
BLUE = (0x1F, 0x6F, 0xEB)  # The first curve's color.


def pixels(path: Path) -> tuple[int, int, list[bytes]]:
    """Width, height and rows of RGB bytes of a PNG of 8 bits a channel."""
    data, at, parts, width, height, depth = path.read_bytes(), 8, [], 0, 0, 3
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, bits, color = struct.unpack(">IIBB", body[:10])
            assert bits == 8
            depth = {2: 3, 6: 4}[color]
        elif kind == b"IDAT":
            parts.append(body)
        at += 12 + size
    raw, rows, before = zlib.decompress(b"".join(parts)), [], bytes(width * depth)
    for y in range(height):
        start = y * (width * depth + 1)
        line = bytearray(raw[start + 1 : start + 1 + width * depth])
        before = unfilter(raw[start], line, before, depth)
        rows.append(before)
    if depth == 4:
        rows = [b"".join(r[i : i + 3] for i in range(0, len(r), 4)) for r in rows]
    return width, height, rows


def unfilter(kind: int, line: bytearray, above: bytes, depth: int) -> bytes:
    for i in range(len(line)):
        left = line[i - depth] if i >= depth else 0
        corner = above[i - depth] if i >= depth else 0
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = above[i]
        elif kind == 3:
            guess = (left + above[i]) // 2
        elif kind == 4:
            near = left + above[i] - corner
            guess = min((left, above[i], corner), key=lambda value: abs(near - value))
        else:
            guess = 0
        line[i] = (line[i] + guess) & 0xFF
    return bytes(line)


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_draws_it(width: int, tmp_path: Path) -> None:
    workers = [
        WorkerRecord(
            name=f"worker:{i}", fits=[fit(*map(epoch, range(8)), state="done")]
        )
        for i in range(2)
    ]
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(page_of(Run(workers=workers, missing=[])), encoding="utf-8")
    process = browse(
        tmp_path,
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
        f"--window-size={width},1200",
        f"--screenshot={picture}",
        page.as_uri(),
    )
    assert picture.exists(), process.stderr
    found_width, height, rows = pixels(picture)
    assert (found_width, height) == (width, 1200)
    blue = [(x, y) for y, row in enumerate(rows) for x in columns_of(row, BLUE)]
    assert len(blue) > 300  # Curves are there,
    assert max(x for x, _ in blue) - min(x for x, _ in blue) > width / 4  # across it,
    # and nothing sticks out at the right: the margin has the background's color.
    margin = {row[3 * (width - 4) :] for row in rows}
    assert len(margin) == 1


def browse(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a browser without a window, with a profile in `folder`, did and printed."""
    assert BROWSER is not None
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def columns_of(row: bytes, color: tuple[int, int, int]) -> list[int]:
    wanted, found, at = bytes(color), [], row.find(bytes(color))
    while at >= 0:
        if at % 3 == 0:
            found.append(at // 3)
        at = row.find(wanted, at + 1)
    return found
