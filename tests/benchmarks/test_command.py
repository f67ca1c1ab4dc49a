"""What the bench refuses before it measures anything."""

import shutil

import pytest
from typer.testing import CliRunner

from bench.__main__ import app
from bench.accelerators import peak_flops


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "ax"], "There are no cases ['x']"),
        (["--layouts", "one,two"], "There are no layouts ['two']"),
        (["--cases", "ag", "--layouts", "gpu"], "have no cases ['a']"),
        (["--cases", "g"], "have no cases ['g']"),
        (["--python", "jax=python"], "write tensorflow=PATH or torch=PATH"),
        (["--python", "torch"], "write tensorflow=PATH or torch=PATH"),
        (["--python", "torch=no/such/python"], "there is no 'no/such/python'"),
    ],
)
def test_unknown_names_are_refused(options, message, tmp_path) -> None:
    result = CliRunner().invoke(app, [*options, "--output", str(tmp_path / "results")])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "results").exists()


@pytest.mark.skipif(shutil.which("taskset") is None, reason="there is no taskset")
def test_a_gpu_that_is_not_there_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    result = CliRunner().invoke(
        app, ["--layouts", "gpu", "--output", str(tmp_path / "results")]
    )
    assert result.exit_code == 1
    assert "Layout gpu is left out: JAX finds no CUDA device here." in result.output
    assert list((tmp_path / "results" / "raw").iterdir()) == []


def test_cards_are_told_apart() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("Tesla V100-SXM2-16GB") is None
    assert peak_flops(None) is None
