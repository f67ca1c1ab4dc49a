"""The notebook runs, and its stored outputs are what it prints."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "getting_started.ipynb"
NUMBER = re.compile(r"\d+(?:\.\d+)?")

RUN = """
import contextlib, io, json, sys
namespace, printed = {"__name__": "__main__"}, []
for number, source in enumerate(json.load(sys.stdin)):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(source, f"cell {number}", "exec"), namespace)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def code_cells() -> list[dict]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def stored(cell: dict) -> str:
    """What the cell printed when it was saved."""
    return "".join(
        "".join(output["text"])
        for output in cell["outputs"]
        if output["output_type"] == "stream" and output["name"] == "stdout"
    )


@pytest.mark.timeout(150)
def test_the_cells_print_what_is_stored(tmp_path: Path) -> None:
    # The notebook sizes its own thread pool; that of this process must not count.
    env = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "NPROC")}
    process = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(["".join(cell["source"]) for cell in code_cells()]),
        cwd=tmp_path,
        env={**env, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    printed = json.loads(process.stdout)
    expected = [stored(cell) for cell in code_cells()]
    assert [NUMBER.sub("#", text) for text in printed] == [
        NUMBER.sub("#", text) for text in expected
    ]
    numbers = [float(n) for text in printed for n in NUMBER.findall(text)]
    # Sums in another order, of another version of XLA.
    assert numbers == pytest.approx(
        [float(n) for text in expected for n in NUMBER.findall(text)], rel=0.02
    )


def test_it_was_run_in_order_and_shows_a_picture() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert any("image/png" in o.get("data", {}) for c in cells for o in c["outputs"])
