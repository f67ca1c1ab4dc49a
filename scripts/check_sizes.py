"""Fail when a Python file under `src` or `tests` has outgrown its limit of lines."""

import sys
from pathlib import Path

MAX_LINES = 600
"""No file under `src` or `tests` may be longer."""

WARN_LINES = 400
"""A file under `src` past this length should be justified in review."""


def main(root: Path) -> int:
    """Check the files under `root`, print what is too long, return the exit status."""
    sizes = {
        path.relative_to(root): len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("src", "tests")
        for path in sorted((root / folder).rglob("*.py"))
    }
    too_long = {path: size for path, size in sizes.items() if size > MAX_LINES}
    for path, size in sizes.items():
        if path not in too_long and path.parts[0] == "src" and size > WARN_LINES:
            print(f"warning: {path} has {size} lines; past {WARN_LINES}, say why")
    for path, size in too_long.items():
        print(f"error: {path} has {size} lines, more than {MAX_LINES}; split it")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
