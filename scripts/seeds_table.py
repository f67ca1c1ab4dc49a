"""Write docs/seeds.md: each program of the seeds, ported, run, and what it has shown.

    JAX_PLATFORMS=cpu python scripts/seeds_table.py             # all, some minutes
    JAX_PLATFORMS=cpu python scripts/seeds_table.py 003 002_tpu # those that begin so

Rows of programs that are not run keep the results of the page.
"""

import argparse
import functools
import os
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("REPLICAX_COMPILATION_CACHE", "off")

from tests.seeds.blocks import PROGRAMS  # noqa: E402
from tests.seeds.blocks_program import Program  # noqa: E402
from tests.seeds.blocks_run import check, migrate, start  # noqa: E402
from tests.seeds.blocks_source import Counts, counts  # noqa: E402

PAGE = ROOT / "docs" / "seeds.md"
DATA = ROOT.parent / "shared" / "data"
NOT_RUN = "not run"

HEADER = """\
# Programs of the texts that replicax began with

Every program of five texts about `tf.distribute`, ported by
[`replicax migrate`](migrate.md) with nothing left to do by hand, and run. The texts are
notes (000), a chapter of a handbook (001), TensorFlow's guide (002) and two articles
(003, 004); the code is in [`tests/seeds/blocks`](../tests/seeds/blocks).

- **lines** are the author's, without empty ones; **ported** are those that the command
  changed or removed; **repaired** are broken in the text, such as `model.complie`.
- What a text presupposes, such as `train_dataset`, was written for TensorFlow and
  ported too. The program of text 001 is in a file that the text does not contain, so it
  is written from its description.
- The machine has no GPUs: programs for them end with an error that says so. Programs
  for TPUs are compiled by the TPU compiler and not run.
- Losses are the first and the last epoch's, with few examples an epoch on two CPU
  cores: they show that a program trains, not how well.

`python scripts/seeds_table.py` writes this page.

"""
COLUMNS = (
    "program",
    "lines",
    "ported",
    "repaired",
    "result",
)

_ROW = re.compile(r"^\| `(?P<name>\d\d\d_\w+)` \|.*\| (?P<result>[^|]*) \|$", re.M)


@functools.cache
def lines_of(program_name: str) -> Counts:
    """How many lines the program's blocks have, and how many are changed."""
    (program,) = (p for p in PROGRAMS if p.name == program_name)
    with tempfile.TemporaryDirectory() as folder:
        ported = migrate(program, Path(folder)).read_text(encoding="utf-8")
    return counts(program, ported)


def row(program: Program, result: str) -> str:
    """The row of a program in the page."""
    lines = lines_of(program.name)
    cells = [f"`{program.name}`"]
    cells += [str(lines.source), str(lines.changed), str(lines.repaired)]
    return f"| {' | '.join([*cells, result])} |\n"


def run(program: Program) -> tuple[str, bool]:
    """What a run of the program has shown, and whether it is what is expected."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            script = migrate(program, Path(folder))
            return check(program, start(program, script, DATA)), True
        except (AssertionError, TimeoutError) as error:
            print(error, file=sys.stderr, flush=True)
            return "**failed**", False


def main() -> int:
    """Run the programs that are asked for and write the page; the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/seeds.md.")
    parser.add_argument("names", nargs="*", help="how the programs' names begin")
    names = tuple(parser.parse_args().names)
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    results = {match["name"]: match["result"] for match in _ROW.finditer(page)}
    is_whole = True
    for program in PROGRAMS:
        if names and not program.name.startswith(names):
            continue
        if program.data and not (DATA / program.data).is_dir():
            print(f"{program.name}: the folder {program.data} is not here", flush=True)
            continue
        begin = time.monotonic()
        results[program.name], is_expected = run(program)
        is_whole &= is_expected
        seconds = time.monotonic() - begin
        print(f"{program.name}: {results[program.name]} ({seconds:.0f} s)", flush=True)
        write(results)
    write(results)
    return 0 if is_whole else 1


def write(results: dict[str, str]) -> None:
    """Write the page."""
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    rows = [row(program, results.get(program.name, NOT_RUN)) for program in PROGRAMS]
    PAGE.write_text(HEADER + head + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
