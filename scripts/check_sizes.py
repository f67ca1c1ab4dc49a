"""Fail when a Python file, or a folder with a budget, has outgrown its limit of lines.

`[tool.replicax.budgets]` in `pyproject.toml` holds the budgets: the most lines that the
Python files under a folder may have together. A folder over its budget fails. So does a
folder more than 3 % under it, and `--lower` writes today's count in its place, so that
a budget can only fall.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 600
"""No Python file of the project may be longer."""

WARN_LINES = 400
"""A file of a distribution past this length should be justified in review."""

SLACK = 0.03
"""The share of its budget by which a folder may stay under it."""


def main(root: Path, *, lower: bool) -> int:
    """Check the files under `root`, print what is too long, return the exit status."""
    sizes = {
        path.relative_to(root): len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("src", "packages", "tests")
        for path in sorted((root / folder).rglob("*.py"))
    }
    errors = [
        *(
            f"{path} has {size} lines, more than {MAX_LINES}; split it"
            for path, size in sizes.items()
            if size > MAX_LINES
        ),
        *check_budgets(root / "pyproject.toml", sizes, lower=lower),
    ]
    for path, size in sizes.items():
        if WARN_LINES < size <= MAX_LINES and "tests" not in path.parts:
            print(f"warning: {path} has {size} lines; past {WARN_LINES}, say why")
    for error in errors:
        print(f"error: {error}")
    return 1 if errors else 0


def check_budgets(
    pyproject: Path, sizes: dict[Path, int], *, lower: bool
) -> Iterator[str]:
    """Yield what is wrong with each budget, or `lower` those that are too high."""
    text = pyproject.read_text(encoding="utf-8")
    budgets: dict[str, int] = tomllib.loads(text)["tool"]["replicax"]["budgets"]
    for folders, budget in budgets.items():
        lines = sum(size for path, size in sizes.items() if is_in(path, folders))
        if lines > budget:
            yield f"{folders} has {lines} lines, more than its budget of {budget}"
        elif lines < budget * (1 - SLACK) and lower:
            text = re.sub(
                rf'(?m)^"{re.escape(folders)}" = \d+$', f'"{folders}" = {lines}', text
            )
        elif lines < budget * (1 - SLACK):
            yield (
                f"{folders} has {lines} lines, over {SLACK:.0%} under its budget of "
                f"{budget}; lower it: python scripts/check_sizes.py --lower"
            )
    if lower:
        pyproject.write_text(text, encoding="utf-8")


def is_in(path: Path, folders: str) -> bool:
    """Whether `path` is under one of `folders`; `folder/*.py` is without subfolders."""
    return any(
        path.match(folder) if folder.endswith(".py") else path.is_relative_to(folder)
        for folder in folders.split(" + ")
    )


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1], lower="--lower" in sys.argv[1:]))
