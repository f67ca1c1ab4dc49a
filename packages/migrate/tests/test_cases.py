"""Scripts before and after: each `cases/X.before.txt` becomes `cases/X.after.txt`."""

from pathlib import Path

import pytest

from replicax_migrate import port
from replicax_migrate.script import MARK

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
def test_comments_go_with_what_is_taken_out_and_others_stay(before: Path) -> None:
    """The port removes comments above a removed statement, and on its line."""
    lines = before.read_text("utf-8").splitlines()
    ported = port(before.read_bytes())
    after = ported.source.decode()
    gone = {note.line for note in ported.notes if "is removed" in note.reason}
    for number, line in enumerate(lines, 1):
        _, mark, comment = line.partition("# ")
        if mark and '"' not in comment:
            is_above = line.lstrip().startswith("#") and number + 1 in gone
            is_gone = number in gone or is_above
            assert (f"# {comment}" not in after) == is_gone, comment


@pytest.mark.parametrize(
    ("comments", "stay"),
    [
        ("# Old.\n{}", False),
        ("# Old.\n# Older.\n{}", False),
        ("{}  # Old.", False),
        ("# A section.\n\n{}", True),
        ("# A section.\n\n# Old.\n{}", True),
    ],
)
def test_comments_of_what_is_taken_out(comments: str, stay: bool) -> None:
    statement = comments.format("tf.compat.v1.enable_eager_execution()")
    source = f"import tensorflow as tf\nx = tf.zeros(3)\n{statement}\ny = x\n"
    text = port(source.encode()).source.decode()
    assert "Old" not in text
    assert ("# A section." in text) == stay


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
