"""Each code block of the seeds as its author wrote it, ported by the command, run."""

import re
from pathlib import Path

import pytest
from tests.seeds.blocks import PROGRAMS
from tests.seeds.blocks_program import Machines, Planned, Program, Tasks
from tests.seeds.blocks_run import check, migrate, start
from tests.seeds.blocks_source import BLOCKS, counts, original, part_text

from replicax.planning import compiler

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
PAGE = Path(__file__).parents[2] / "docs" / "seeds.md"
AUTHORS = sorted({block for program in PROGRAMS for block in program.blocks})


def _case(program: Program) -> object:
    marks = [pytest.mark.multiprocess, pytest.mark.timeout(program.limit_s + 60)]
    if program.is_slow:
        marks.append(pytest.mark.slow)
    return pytest.param(program, id=program.name, marks=marks)


def _needs(program: Program) -> None:
    if isinstance(program.run, Planned) and compiler.find_libtpu() is None:
        pytest.skip("libtpu, with the TPU compiler in it, is not here")
    tasks = program.run.addresses if isinstance(program.run, Machines) else {}
    servers = isinstance(program.run, Tasks) and program.run.ps
    if servers or any(task.startswith("ps") for task in tasks):
        pytest.importorskip("pyarrow")


@pytest.mark.parametrize("program", [_case(p) for p in PROGRAMS])
def test_the_program_is_ported_and_runs(
    program: Program, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    _needs(program)
    data = request.getfixturevalue("data_dir") if program.data else None
    script = migrate(program, tmp_path)
    assert "tensorflow" not in _code(script.read_text(encoding="utf-8"))
    assert check(program, start(program, script, data))


def _code(text: str) -> str:
    """A text without its comments."""
    return re.sub(r"#.*", "", text)


@pytest.mark.parametrize("block", AUTHORS)
def test_the_block_is_the_authors(block: str) -> None:
    """Without its repairs: the same text in the seed, up to line breaks and spaces."""
    if not SEEDS.is_dir():
        pytest.skip(f"the folder {SEEDS.name} is not here")
    (seed,) = SEEDS.glob(f"{block[:3]}_*.txt")
    everything = "".join(seed.read_text(encoding="utf-8").split())
    assert "".join(original(block).split()) in everything


def test_every_file_is_used() -> None:
    used = {f"{part}.py.txt" for program in PROGRAMS for part in program.parts}
    assert used == {path.name for path in BLOCKS.iterdir()}
    assert all(part_text(name.removesuffix(".py.txt")) for name in used)
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.slow
def test_the_page_has_all_programs_and_their_lines(tmp_path: Path) -> None:
    """Results are those of the run that wrote it; lines are counted again here."""
    rows = re.findall(r"^\| `(\d\d\d_\w+)` \|(.*)\|$", PAGE.read_text("utf-8"), re.M)
    assert [name for name, _ in rows] == [program.name for program in PROGRAMS]
    for program, (_, cells) in zip(PROGRAMS, rows, strict=True):
        ported = migrate(program, tmp_path).read_text(encoding="utf-8")
        lines = counts(program, ported)
        expected = [str(lines.source), str(lines.changed), str(lines.repaired)]
        assert [cell.strip() for cell in cells.split("|")][:3] == expected, program.name
