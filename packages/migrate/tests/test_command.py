"""The command: what it prints, writes, and exits with."""

import os
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
    assert result.exit_code == 0
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
    assert result.exit_code == 0
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
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "keras.ops.sum" in script.read_text()
    assert link.is_symlink()
    assert script.stat().st_mode & 0o777 == 0o750
    assert sorted(os.listdir(tmp_path)) == ["link.py", "train.py"]
    before = script.stat().st_mtime_ns
    assert invoke("--write", script).exit_code == 0
    assert script.stat().st_mtime_ns == before


def test_a_folder_has_its_scripts_and_the_worst_status(
    script: Path, tmp_path: Path
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "left.py").write_text(LEFT)
    assert invoke(tmp_path).exit_code == 2  # Neither --diff nor --write.
    result = invoke("--write", tmp_path)
    assert result.exit_code == 1
    assert "keras.ops.sum" in script.read_text()
    assert "# replicax:" in (tmp_path / "inner" / "left.py").read_text()


def test_stdin_goes_to_stdout() -> None:
    result = invoke("-", text=BEFORE)
    assert result.exit_code == 0
    assert result.stdout.endswith("x = keras.ops.sum(y)\n")
    assert "<stdin>: nothing is left" in result.stderr


def test_a_syntax_error_names_file_and_line_and_the_others_are_ported(
    script: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import tensorflow as tf\n!pip install x\n")
    result = invoke("--write", broken, script)
    assert result.exit_code == 2
    assert f"{broken}:2:1: " in result.stderr
    assert "keras.ops.sum" in script.read_text()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    result = invoke(tmp_path / "none.py")
    assert result.exit_code == 2
    assert "none.py: cannot be read: No such file or directory" in result.stderr
    (tmp_path / "latin.py").write_bytes(b"x = '\xff'\n")
    result = invoke(tmp_path / "latin.py")
    assert result.exit_code == 2
    assert "latin.py:1: invalid or missing encoding" in result.stderr


def test_deep_nesting_is_said(script: Path) -> None:
    script.write_text("import tensorflow as tf\nx = 1" + " + 1" * 1000 + "\n")
    result = invoke(script)
    assert result.exit_code == 2
    assert f"{script}:1: its expressions are nested too deeply" in result.stderr


@pytest.mark.parametrize("arguments", [["--diff", "--write", "x.py"], []])
def test_wrong_usage(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_without_libcst_it_says_how_to_install(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    result = invoke(script)
    assert result.exit_code == 2
    assert "pip install 'replicax[migrate]'" in result.stderr


SCRIPT = """import sys

import numpy as np
import tensorflow as tf
from model import make

strategy = tf.distribute.MirroredStrategy()
x = np.ones((8, int(sys.argv[1])), "float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x)).batch(4)
with strategy.scope():
    model = make()
    model.compile("sgd", "mse")

model.fit(dataset)
raise ValueError("A step was run.")
"""
MODEL = """import tensorflow as tf


def make():
    return tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(3)])
"""


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_check_names_the_line_of_the_original_that_fails(tmp_path: Path) -> None:
    names = {"model.py": MODEL, "train.py": SCRIPT}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    paths = [tmp_path / name for name in names]
    result = invoke("--check", "--arguments", "4", "--diff", *paths)
    assert result.exit_code == 1
    assert f"{paths[1]}:14: check: ValueError: " in result.stderr
    assert "to have value 3, but received input" in result.stderr
    assert paths[1].read_text() == SCRIPT


@pytest.mark.timeout(60)
def test_check_has_a_deadline(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\n\ntime.sleep(50)\n")
    result = invoke("--check", "--check-seconds", "0.5", "--diff", script)
    assert result.exit_code == 1
    assert "no training step within 0.5 s" in result.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_check_reports_a_script_that_does_not_train(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("if False:\n    model.fit(x)\n")
    result = invoke("--check", "--diff", script)
    assert result.exit_code == 1
    assert f"{script}:1: check: not checked: it ended without a" in result.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_check_runs_the_ported_modules_up_to_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)
    result = invoke("--check", "--arguments", "3", "--write", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count(": checked\n") == 2


SERVERS = """import tensorflow as tf

strategy = tf.distribute.experimental.ParameterServerStrategy(
    tf.distribute.cluster_resolver.TFConfigClusterResolver())
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_check_says_from_where_on_servers_are_not_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SERVERS)
    result = invoke("--check", "--diff", script)
    assert result.exit_code == 1
    assert f"{script}:3: check: not checked from this line on: " in result.stderr
    assert "variables of ParameterServerStrategy" in result.stderr
    assert "Error: " not in result.stderr


ALONE = """import numpy as np
import tensorflow as tf

x = np.ones((4, 3), "float32")
model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(3)])
model.compile("sgd", "mse", metrics=["mae"])
print(model.predict(x).shape, model.evaluate(x, x))
model.train_on_batch(x, x)
raise ValueError("A step was run.")
"""
STEP = """

def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))


step(x)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_check_stops_at_the_step_of_a_script_without_a_strategy(tmp_path: Path) -> None:
    call = "model.train_on_batch(x, x)\n"
    names = {"batch.py": ALONE, "tape.py": ALONE.replace(call, STEP)}
    names["wrong.py"] = ALONE.replace('["mae"]', "[lambda y, p: y @ p]")
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    result = invoke("--check", "--diff", *(tmp_path / name for name in names))
    assert result.stderr.count(": checked\n") == 2, result.stderr
    assert f"{tmp_path / 'wrong.py'}:6: check: TypeError: dot_general " in result.stderr
    assert "TRACEBACK" not in result.stderr
