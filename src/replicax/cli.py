"""The command line `replicax`: its own commands, and those of other distributions.

Another distribution adds a command by an entry point that names the command's function:

    [project.entry-points."replicax.commands"]
    migrate = "replicax_migrate.command:migrate"

The commands of replicax itself are imported here: they also run from a checkout that
is not installed.
"""

from importlib.metadata import entry_points
from typing import Annotated

import typer

from replicax import __version__
from replicax.commands.info import info
from replicax.commands.manifest import manifest
from replicax.commands.plan import plan
from replicax.commands.run import run
from replicax.commands.token import token

__all__ = ["app", "main"]

# Arguments after the script are the script's own.
_SCRIPT_LAST = {"allow_interspersed_args": False}

app = typer.Typer(
    name="replicax",
    help="Distributed training strategies for Keras 3 on JAX.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def main() -> None:
    """Run the command line; the `replicax` script calls this."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"replicax {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Distributed training strategies for Keras 3 on JAX."""


app.command()(info)
app.command(context_settings=_SCRIPT_LAST)(run)
app.command(context_settings=_SCRIPT_LAST)(plan)
app.command(context_settings=_SCRIPT_LAST)(manifest)
app.command()(token)

# Each call of `replicax` loads all commands; a command imports heavy packages itself.
for entry_point in entry_points(group="replicax.commands"):
    app.command(entry_point.name)(entry_point.load())
