"""What `import replicax` does, and does not do, in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_python(
    code: str, keras_backend: str | None = None, keras_home: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    if keras_home is not None:
        env["KERAS_HOME"] = str(keras_home)
    if keras_backend is not None:
        env["KERAS_BACKEND"] = keras_backend
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_keras_gets_the_jax_backend() -> None:
    process = run_python(
        "import os, replicax, keras\n"
        "print(os.environ['KERAS_BACKEND'], keras.config.backend())"
    )
    assert process.stdout == "jax jax\n", process.stderr


def test_the_jax_backend_may_be_set_already() -> None:
    process = run_python("import keras, replicax", keras_backend="jax")
    assert process.returncode == 0, process.stderr


def test_no_jax_device_is_started() -> None:
    process = run_python(
        "import replicax\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    assert process.stdout == "False\n", process.stderr


def test_optional_packages_are_not_imported() -> None:
    process = run_python(
        "import sys, replicax\n"
        "print(sorted({'grain', 'tensorflow', 'torch'} & set(sys.modules)))"
    )
    assert process.stdout == "[]\n", process.stderr


@pytest.mark.parametrize("backend", ["numpy", "tensorflow", "torch"])
def test_another_backend_in_the_environment_is_refused(backend: str) -> None:
    process = run_python("import replicax", keras_backend=backend)
    assert_refused(process, backend)


def test_advice_fits_a_variable_in_the_environment() -> None:
    error = run_python("import replicax", keras_backend="torch").stderr
    assert "the environment asks Keras to run on 'torch'" in error
    assert "The environment variable KERAS_BACKEND names 'torch'" in error
    assert "export KERAS_BACKEND=jax" in error
    assert "import replicax` above" not in error  # It would not help.


def test_advice_fits_a_file_of_keras(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "numpy"}')
    error = run_python("import keras, replicax", keras_home=tmp_path).stderr
    assert "Keras is running on 'numpy'" in error
    assert "Write `import replicax` above every import of keras" in error
    assert str(tmp_path / "keras.json") in error
    assert "start Python again" in error
    process = run_python(
        "import replicax, keras; print(keras.config.backend())", keras_home=tmp_path
    )
    assert process.stdout == "jax\n", process.stderr


def test_a_failed_import_of_keras_can_be_mended(tmp_path: Path) -> None:
    """As in a notebook: Keras does not find TensorFlow, then replicax is imported."""
    process = run_python(
        "import sys\n"
        "sys.modules['tensorflow'] = None\n"  # As if it were not installed.
        "try:\n    import keras\n"
        "except ImportError as error:\n    print('failed')\n"
        "import replicax, keras\n"
        "print(keras.config.backend())",
        keras_home=tmp_path,
    )
    assert process.stdout == "failed\njax\n", process.stderr


def test_keras_on_another_backend_is_refused() -> None:
    process = run_python("import keras, replicax", keras_backend="numpy")
    assert_refused(process, "numpy")


def assert_refused(process: subprocess.CompletedProcess[str], backend: str) -> None:
    assert process.returncode != 0, "replicax was imported"
    error = process.stderr.strip().splitlines()[-1]
    assert error.startswith(("ImportError: ", "RuntimeError: ")), process.stderr
    assert f"'{backend}'" in error
    assert "KERAS_BACKEND" in error
    assert "jax" in error
