"""Whose a source file is."""

import subprocess
import sys
from pathlib import Path


def test_an_environment_that_is_a_link_is_no_users_code(tmp_path: Path) -> None:
    link = tmp_path / "environment"
    link.symlink_to(sys.prefix)
    program = (
        "import jinja2, json\n"
        "from replicax._util import user_code\n"
        "for file in (jinja2.__file__, json.__file__, user_code.__file__):\n"
        "    print(file, user_code.is_installed_file(file))\n"
    )
    found = subprocess.run(
        [link / "bin" / "python", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.splitlines()
    assert found[0].startswith(str(link))
    assert [line.split()[1] for line in found] == ["True"] * 3
