"""Which files are the user's code."""

import subprocess
import sys
from pathlib import Path


def test_files_of_a_linked_environment_are_not_the_users(tmp_path: Path) -> None:
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
