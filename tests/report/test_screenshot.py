"""A browser draws the page, in the widths of a desktop and a phone."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.report.test_page import epoch, fit

from replicax.report.page import page_of
from replicax.report.runs import Run, WorkerRecord

image = pytest.importorskip("matplotlib.image", reason="it reads the screenshot")

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(150)]

BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
    None,
)
BLUE = (0x1F, 0x6F, 0xEB)  # The first curve's color.


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
    pixels = (255 * image.imread(picture)[..., :3]).round().astype(int)
    assert pixels.shape == (1200, width, 3)
    _, columns = (pixels == BLUE).all(-1).nonzero()
    assert len(columns) > 300
    assert np.ptp(columns) > width / 4  # The curves cross the page.
    # Nothing extends into the right margin, which has the background's color.
    margin = pixels[:, -4:].reshape(-1, 3)
    assert (margin == margin[0]).all()


def browse(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a browser without a window, with a profile in `folder`."""
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
