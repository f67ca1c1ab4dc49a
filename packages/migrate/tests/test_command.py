"""The command: what it prints, writes, and exits with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from replicax.cli import app

BEFORE = "import tensorflow as tf\n\nx = tf.reduce_sum(y)\n"
LEFT = "import tensorflow as tf\n\nx = tf.image.rot90(y)\n"


def invoke(*arguments: object, text: str | None = None) -> Result:
    names = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, ["migrate", *names], input=text)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(BEFORE)
    return path


def test_the_port_goes_to_stdout_and_the_report_to_stderr(script: Path) -> None:
    result = invoke(script)
    assert result.exit_code == 2  # Not run.
    assert result.stdout.endswith("x = keras.ops.sum(y)\n")
    assert result.stderr == (
        f"{script}: nothing is left to port by hand\n"
        "Pass --check to run ports up to their first step.\n"
    )
    assert script.read_text() == BEFORE


def test_what_is_left_makes_the_status_one(script: Path) -> None:
    script.write_text(LEFT)
    result = invoke(script)
    assert result.exit_code == 1
    assert f"{script}:3: left: tf.image.rot90 stays" in result.stderr
    assert f"{script}: 1 thing is left to port by hand" in result.stderr
    assert "# replicax: tf.image.rot90 stays" in result.stdout


def test_notes_can_be_left_out(script: Path) -> None:
    script.write_text("import tensorflow as tf\ntf.random.set_seed(1)\n")
    assert f"{script}:2: note: tf.random.set_seed" in invoke(script).stderr
    assert ": note: " not in invoke(script, "--quiet").stderr


def test_diff_changes_nothing_and_has_no_colours(script: Path) -> None:
    result = invoke(script, "--diff")
    assert result.exit_code == 2
    assert "-x = tf.reduce_sum(y)\n+x = keras.ops.sum(y)\n" in result.stdout
    assert "\x1b" not in result.stdout
    assert script.read_text() == BEFORE


def test_write_keeps_mode_and_links_and_leaves_no_other_file(
    script: Path, tmp_path: Path
) -> None:
    script.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(script)
    result = invoke("--write", link)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "keras.ops.sum" in script.read_text()
    assert link.is_symlink()
    assert script.stat().st_mode & 0o777 == 0o750
    assert sorted(os.listdir(tmp_path)) == ["link.py", "train.py"]
    before = script.stat().st_mtime_ns
    assert invoke("--write", script).exit_code == 2
    assert script.stat().st_mtime_ns == before


def test_a_folder_has_its_scripts_and_the_worst_status(
    script: Path, tmp_path: Path
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "left.py").write_text(LEFT)
    assert invoke(tmp_path).exit_code == 3  # Neither --diff nor --write.
    result = invoke("--write", tmp_path)
    assert result.exit_code == 1
    assert "keras.ops.sum" in script.read_text()
    assert "# replicax:" in (tmp_path / "inner" / "left.py").read_text()


def test_stdin_goes_to_stdout() -> None:
    result = invoke("-", text=BEFORE)
    assert result.exit_code == 2
    assert result.stdout.endswith("x = keras.ops.sum(y)\n")
    assert "<stdin>: nothing is left" in result.stderr


def test_a_syntax_error_names_file_and_line_and_the_others_are_ported(
    script: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import tensorflow as tf\n!pip install x\n")
    result = invoke("--write", broken, script)
    assert result.exit_code == 3
    assert f"{broken}:2:1: " in result.stderr
    assert "keras.ops.sum" in script.read_text()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    result = invoke(tmp_path / "none.py")
    assert result.exit_code == 3
    assert "none.py: cannot be read: No such file or directory" in result.stderr
    (tmp_path / "latin.py").write_bytes(b"x = '\xff'\n")
    result = invoke(tmp_path / "latin.py")
    assert result.exit_code == 3
    assert "latin.py:1: invalid or missing encoding" in result.stderr


def test_deep_nesting_is_said(script: Path) -> None:
    script.write_text("import tensorflow as tf\nx = 1" + " + 1" * 1000 + "\n")
    result = invoke(script)
    assert result.exit_code == 3
    assert f"{script}:1: its expressions are nested too deeply" in result.stderr


def test_wrong_usage(tmp_path: Path) -> None:
    for arguments in (["--diff", "--write", "x.py"], [tmp_path]):
        result = invoke(*arguments)
        assert result.exit_code == 3
        assert "Error: " in result.stderr


@pytest.mark.timeout(60)
def test_the_port_imports_neither_replicax_nor_keras() -> None:
    code = "import sys, replicax_migrate; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert {"grain", "jax", "keras", "replicax"}.isdisjoint(done.stdout.split())
