"""Checks of arguments that several commands take."""

from collections.abc import Sequence
from pathlib import Path

import typer

__all__ = ["require_script", "warn_of_late_options"]


def warn_of_late_options(context: typer.Context, arguments: Sequence[str]) -> None:
    """Warn if `arguments` of the script look like options of the command.

    There is no warning of an option that the command itself received too.
    """
    options = {
        option: parameter.name or ""
        for parameter in context.command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    names = dict.fromkeys(argument.partition("=")[0] for argument in arguments)
    late = [
        name
        for name in names
        if name in options and not _is_on_command_line(context, options[name])
    ]
    if late:
        typer.echo(
            f"replicax {context.info_name}: after the script, {', '.join(late)} goes "
            "to the script. Write options of replicax before it.",
            err=True,
        )


def _is_on_command_line(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def require_script(path: str) -> None:
    """Raise a `BadParameter` unless the script exists."""
    if Path(path).is_file():
        return
    raise typer.BadParameter(
        f"There is no script {path!r}. Give the path of a Python file, without "
        "`python` before it, or -m and the name of a module."
    )
