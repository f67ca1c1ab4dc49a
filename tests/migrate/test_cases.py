"""Scripts before and after: each `cases/X.before.txt` becomes `cases/X.after.txt`."""

from pathlib import Path

import pytest

from replicax.migrate import port
from replicax.migrate.script import MARK

CASES = sorted((Path(__file__).parent / "cases").glob("*.before.txt"))
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


def case_id(path: Path) -> str:
    return path.name.partition(".")[0]


@pytest.mark.parametrize("before", CASES, ids=case_id)
def test_the_port_is_the_expected_one(before: Path) -> None:
    after = before.with_name(before.name.replace("before", "after"))
    assert port(before.read_bytes()).source.decode() == after.read_text("utf-8")


@pytest.mark.parametrize("before", [*CASES, *SCRIPTS], ids=case_id)
def test_a_port_is_python_and_stays_as_it_is(before: Path) -> None:
    ported = port(before.read_bytes())
    compile(ported.source, before.name, "exec")
    again = port(ported.source)
    assert again.source == ported.source
    assert bool(again.left) == bool(ported.left)


@pytest.mark.parametrize("before", CASES, ids=case_id)
def test_all_comments_are_kept(before: Path) -> None:
    source = before.read_text("utf-8")
    ported = port(before.read_bytes()).source.decode()
    for line in source.splitlines():
        _, mark, comment = line.partition("# ")
        if mark and '"' not in comment:
            assert f"# {comment}" in ported


@pytest.mark.parametrize("before", CASES, ids=case_id)
def test_what_is_left_is_marked_and_has_its_line(before: Path) -> None:
    lines = before.read_text("utf-8").splitlines()
    ported = port(before.read_bytes())
    marks = {
        line.strip().removeprefix(MARK)
        for line in ported.source.decode().splitlines()
        if line.strip().startswith(MARK)
    }
    assert marks == {finding.reason for finding in ported.left}
    for finding in [*ported.left, *ported.notes]:
        begin = finding.source.removesuffix("...")[:12].split("(")[0].split("[")[0]
        near = " ".join(lines[finding.line - 1 : finding.line + 2])
        assert begin.split(" #")[0].strip() in near
