"""The command line, in this process and as a process of its own."""

import glob
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner, Result

from replicax.cli import app
from replicax.cluster.spec import ClusterSpec
from replicax.ps.credentials import Credentials

CLUSTER = {
    "cluster": {"worker": ["a:2222", "b:2222"]},
    "task": {"type": "worker", "index": 1},
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF_CONFIG, wide lines, and no trace of the variable that `info` sets."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def info_json() -> dict:
    return json.loads(invoke("info", "--json").stdout)


def test_info_names_devices_versions_and_strategy() -> None:
    result = invoke("info")
    assert result.exit_code == 0, result.output
    device = jax.local_devices()[0]
    assert f"{jax.local_device_count()} x {device.platform}" in result.output
    assert f"jax {jax.__version__}" in result.output
    assert re.search(r"TF_CONFIG +not set", result.output)
    assert re.search(r"fits here +\w+Strategy", result.output)


def test_info_as_json() -> None:
    report = info_json()
    assert report["errors"] == []
    assert report["backend"] == jax.default_backend()
    assert sum(group["count"] for group in report["devices"]) == jax.device_count()
    assert report["versions"]["jax"] == jax.__version__
    assert report["tf_config"] is None
    assert report["recommendation"]["strategy"].endswith("Strategy")


def test_info_understands_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(CLUSTER))
    result = invoke("info")
    assert result.exit_code == 0, result.output
    fingerprint = ClusterSpec(CLUSTER["cluster"]).fingerprint
    assert f"cluster {fingerprint}: 2 worker; this process: worker 1" in result.output
    assert "MultiWorkerMirroredStrategy" in result.output

    report = info_json()
    assert report["tf_config"] == {
        "cluster": CLUSTER["cluster"],
        "fingerprint": fingerprint,
        "task_type": "worker",
        "task_index": 1,
    }


@pytest.mark.parametrize("text", ["", "  "])
def test_a_blank_tf_config_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    result = invoke("info")
    assert result.exit_code == 0
    assert re.search(r"TF_CONFIG +not set", result.output)


def test_info_names_the_problem_of_tf_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_CONFIG", "{oops [red]")
    result = invoke("info")
    assert result.exit_code == 1
    assert re.search(r"TF_CONFIG +malformed", result.output)
    assert "malformed: {oops [red]" in result.output
    assert "quotes: line 1 column 2" in result.output
    assert "fits here" not in result.output  # The cluster is unknown.

    report = info_json()
    assert report["recommendation"] is None
    assert len(report["errors"]) == 1


def test_info_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_devices() -> None:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "local_devices", no_devices)
    result = invoke("info")
    assert result.exit_code == 1
    assert "JAX finds no devices" in result.output
    assert "Unable to initialize backend 'tpu'" in result.output


def test_info_warns_of_a_pool_with_too_few_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if jax.default_backend() != "cpu" or jax.local_device_count() < 2:
        pytest.skip("needs several CPU devices")
    monkeypatch.setenv("NPROC", "1")
    assert "share a pool of 1 threads" in invoke("info").output


def test_the_command_line_does_not_import_jax() -> None:
    code = "import sys, replicax.cli; print(sorted({'jax', 'keras'} & {*sys.modules}))"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert process.stdout == "[]\n", process.stderr


def test_another_distribution_adds_a_command(tmp_path: Path) -> None:
    (tmp_path / "greetings.py").write_text(
        "def greet(name: str) -> None:\n    print('Hello,', name)\n"
    )
    metadata = tmp_path / "greetings-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: greetings\nVersion: 1.0\n")
    entry_point = "[replicax.commands]\ngreet = greetings:greet\n"
    (metadata / "entry_points.txt").write_text(entry_point)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-c", _MAIN, "greet", "Ada"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.stdout == "Hello, Ada\n", process.stderr


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"replicax \d+\.\d+\.\d+\S*\n", result.output)


def test_the_script_in_a_process_of_its_own() -> None:
    script = shutil.which("replicax", path=sysconfig.get_path("scripts"))
    command = [script] if script else [sys.executable, "-c", _MAIN]
    process = subprocess.run(
        [*command, "info", "--json"],
        env={**os.environ, "TF_CONFIG": "[]", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 1, process.stderr
    report = json.loads(process.stdout)
    assert report["backend"] == "cpu"
    assert "it is not a JSON object" in report["errors"][0]
    assert "Traceback" not in process.stderr


def test_info_does_not_load_libtpu_without_chips() -> None:
    """Where it is installed all the same, it prints errors and changes SIGTERM."""
    if importlib.util.find_spec("libtpu") is None or glob.glob("/dev/accel*"):
        pytest.skip("needs libtpu, and a machine without TPUs")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPU_"))}
    process = subprocess.run(
        [sys.executable, "-c", _MAIN, "info"],
        env=plain,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""


_MAIN = "from replicax.cli import main; main()"


def test_tokens_are_valid_and_new() -> None:
    tokens = [invoke("token").stdout for _ in range(2)]
    assert tokens[0] != tokens[1]
    for token in tokens:
        line = token.removesuffix("\n")
        assert Credentials.from_environment({"REPLICAX_PS_TOKEN": token}).accepts(line)
