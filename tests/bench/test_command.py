"""What `replicax bench` refuses before it measures anything."""

import pytest
from typer.testing import CliRunner

from replicax.cli import app


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "ax"], "There are no cases ['x']"),
        (["--layouts", "one,two"], "There are no layouts ['two']"),
    ],
)
def test_unknown_names_are_refused(options, message, tmp_path) -> None:
    result = CliRunner().invoke(
        app, ["bench", *options, "--output", str(tmp_path / "results")]
    )
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "results").exists()
