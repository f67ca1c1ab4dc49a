"""Checks of arguments that several commands take."""

from pathlib import Path

import typer

__all__ = ["require_script"]


def require_script(path: str) -> None:
    """Raise unless a file is there.

    Args:
        path: The path of a script, as the user gave it.

    Raises:
        BadParameter: If no file is there; the message says how scripts are given.

    Example:
        >>> require_script("no-such-file.py")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ...
        BadParameter: There is no script 'no-such-file.py'. ...
    """
    if Path(path).is_file():
        return
    raise typer.BadParameter(
        f"There is no script {path!r}. Give the path of a Python file, without "
        "`python` before it, or -m and the name of a module."
    )
