"""Notebooks: their cells are ported as one script, and stay cells."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from replicax.cli import app
from replicax_migrate import port_notebook


def notebook(*cells: str, **parts: Any) -> bytes:
    made = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "source": lines(code)}
        for code in cells
    ]
    text = {"cell_type": "markdown", "metadata": {}, "source": ["# é tf.abs\n"]}
    whole = {"cells": [text, *made], "metadata": {}, "nbformat": 4, **parts}
    return f"{json.dumps(whole, indent=1, ensure_ascii=False)}\n".encode()


def lines(code: str) -> list[str]:
    return code.splitlines(keepends=True)


def ported_cells(*cells: str) -> list[str]:
    """The ported code of the cells; nothing may be left."""
    ported = port_notebook(notebook(*cells))
    assert ported.left == ()
    assert port_notebook(ported.source).source == ported.source
    expected = json.loads(notebook(*cells))
    done = json.loads(ported.source)
    codes = [cell["source"] for cell in done["cells"][1:]]
    for cell in (*expected["cells"], *done["cells"]):
        cell.pop("source")
    assert done == expected
    return ["".join(code) for code in codes]


def test_names_of_one_cell_are_known_in_the_others() -> None:
    first, second, third = ported_cells(
        "import tensorflow as tf\nK = tf.keras.backend",
        "",
        "x = K.sum(y)\nx",
    )
    assert first.endswith("import keras\nK = keras.backend")
    assert second == ""
    assert third == "x = keras.ops.sum(y)\nx"


def test_commands_of_ipython_stay() -> None:
    commands = "try:\n    %pip install x \\\n      y\nexcept Exception:\n    pass"
    shell = "%%bash\nif true; then\n  echo tf.abs\nfi"
    first, *others = ported_cells(
        "%matplotlib inline\nimport tensorflow as tf\nfiles = !ls\ntf.abs?",
        commands,
        shell,
        "%%time\ny = tf.abs(x)",
        "z = (x\n     % y)",
    )
    assert first.splitlines()[0] == "%matplotlib inline"
    assert first.splitlines()[-2:] == ["files = !ls", "tf.abs?"]
    assert others[:2] == [commands, shell]
    assert others[2:] == ["%%time\ny = keras.ops.abs(x)", "z = (x\n     % y)"]


def test_a_notebook_without_tensorflow_stays_byte_for_byte() -> None:
    source = notebook("%time\nx = 1", "!ls").replace(b"\n ", b"\n    ")
    assert port_notebook(source).source == source


def test_what_is_left_of_tensorflow_is_imported_last_in_its_cell() -> None:
    imports = "import tensorflow as tf\nimport tensorflow_hub as hub\n\nimport os\n"
    used = "import numpy as np\nprint(np.e)\ny = tf.image.rot90(hub.load(x))"
    ported = port_notebook(notebook(imports + used))
    first = json.loads(ported.source)["cells"][1]
    lines = "".join(first["source"]).splitlines()
    names = [line for line in lines if "import" in line]
    assert names[-4:-2] == ["import os", "import numpy as np"]
    assert names[-2:] == ["import tensorflow as tf", "import tensorflow_hub as hub"]
    assert lines.index(names[-1]) < lines.index("print(np.e)")
    assert port_notebook(ported.source).source == ported.source


def test_findings_name_cells_and_their_lines() -> None:
    script = "%%bash\nimport tensorflow as tf"
    source = notebook("import tensorflow as tf", "x = 1\ny = tf.image.rot90(x)", script)
    rot90, written = port_notebook(source).left
    assert (rot90.place, rot90.source) == ("cell 2:2", "tf.image.rot90")
    assert written.place == "cell 3:2"
    assert "save its text as a script" in written.reason


def test_cells_that_write_a_script_are_ported_as_one() -> None:
    model = "import tensorflow as tf\n\ndef size(x):\n    return tf.size(x)\n"
    used, written, other = ported_cells(
        "import parts", f"%%writefile parts.py\n{model}", "%%writefile a.txt\ntf.abs"
    )
    assert used == "import parts"
    assert written.startswith("%%writefile parts.py\nimport replicax as rx")
    assert written.endswith("\n    return keras.ops.size(x)\n")
    assert other == "%%writefile a.txt\ntf.abs"


def test_findings_in_a_written_script_name_its_cell() -> None:
    script = "%%writefile parts.py\nimport tensorflow as tf\ny = tf.image.rot90(x)"
    (left,) = port_notebook(notebook("import tensorflow as tf", script)).left
    assert (left.place, left.source) == ("cell 2:3", "tf.image.rot90")


def test_a_written_script_that_is_not_python_is_reported() -> None:
    script = "%%writefile parts.py\nimport tensorflow as tf\n%load x"
    (left,) = port_notebook(notebook("x = 1", script)).left
    assert left.place == "cell 2:2"
    assert "save its text as a script" in left.reason


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (b"x = 1", "Expecting value"),
        (b'{"worksheets": []}', "the notebook has no cells"),
        (notebook("x = 1", "x = 1\ny = = 2"), "cell 2:2: "),
    ],
)
def test_what_is_no_notebook_is_refused(source: bytes, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        port_notebook(source)


def test_cells_that_are_indented_are_python() -> None:
    source = notebook(
        "import tensorflow as tf", "  if 1:\n    tf.abs(x)\n  %time tf.abs(x)"
    )
    ported = port_notebook(source)
    assert ported.left == ()
    code = "".join(json.loads(ported.source)["cells"][-1]["source"])
    assert code == "if 1:\n  keras.ops.abs(x)\n%time tf.abs(x)"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["migrate", *map(str, arguments)])


def test_the_command_ports_the_notebooks_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_bytes(notebook("import tensorflow as tf", "tf.image.rot90(x)"))
    copy = tmp_path / ".ipynb_checkpoints" / "train.ipynb"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    result = invoke("--write", tmp_path)
    assert result.exit_code == 1
    assert f"{path}:cell 2:1: left: tf.image.rot90 stays" in result.stderr
    assert "# replicax: tf.image.rot90" in path.read_text()
    assert "# replicax:" not in copy.read_text()
    path.write_text("{}")
    result = invoke(path)
    assert result.exit_code == 3
    assert f"{path}: cannot be read as a notebook: the notebook" in result.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_check_names_the_cell_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_bytes(
        notebook("%time\nimport tensorflow as tf", "x = 1\ntf.abs(x) + {}")
    )
    result = invoke("--check", "--diff", path)
    assert result.exit_code == 1
    assert f"{path}:cell 2:2: check: TypeError: " in result.stderr
