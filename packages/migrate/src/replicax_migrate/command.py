"""`replicax migrate`: ports tf.distribute scripts to replicax."""

import difflib
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from replicax._util.files import write_whole

if TYPE_CHECKING:
    from replicax_migrate import Ported

_Ports: TypeAlias = "dict[str, tuple[bytes, Ported]]"

__all__ = ["migrate"]

_COLOURS = {"+": typer.colors.GREEN, "-": typer.colors.RED, "@": typer.colors.CYAN}
_NOTHING_LEFT, _SOMETHING_LEFT, _UNREADABLE = 0, 1, 2


def migrate(
    scripts: Annotated[
        list[str],
        typer.Argument(
            help="Python scripts, notebooks, folders of them, or - for standard input."
        ),
    ],
    diff: Annotated[
        bool, typer.Option("--diff", help="Print what would change.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Change the scripts in place.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No notes, only what is left.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run each ported script up to its first training step."
        ),
    ] = False,
    arguments: Annotated[
        str, typer.Option("--arguments", help="What --check passes to the scripts.")
    ] = "",
    check_seconds: Annotated[
        float,
        typer.Option(
            "--check-seconds",
            min=0.1,
            help="A script that takes --check longer is ended and reported.",
        ),
    ] = 600.0,
) -> None:
    """Port tf.distribute scripts to replicax, Keras 3 and Grain.

    Prints the ported script, and on standard error what could not be ported, with
    line numbers of the original. In the script those places are marked with comments
    that begin with "# replicax:".

    With --check, a script of which nothing is left is run on CPUs up to its first
    training step, which is compiled and not run; an error there is reported, and so is
    a script that ends without one.

    Exits with status 0 if nothing is left to do, with 1 if something is or a check has
    failed, and with 2 if a script cannot be read or is not Python.
    """
    if diff and write:
        raise typer.BadParameter("Pass --diff or --write, not both.")
    if importlib.util.find_spec("libcst") is None:
        typer.echo(
            "Error: this needs the package libcst, which is not installed. Install it "
            "with: pip install 'replicax[migrate]'",
            err=True,
        )
        raise typer.Exit(_UNREADABLE)
    files = _files(scripts)
    if len(files) > 1 and not (diff or write):
        raise typer.BadParameter(
            f"Got {len(files)} scripts: pass --diff or --write.", param_hint="SCRIPTS"
        )
    scripts_and_ports: _Ports = {}
    statuses = [_migrate(file, diff, write, quiet, scripts_and_ports) for file in files]
    if check:
        split = shlex.split(arguments)
        statuses.append(_check(scripts_and_ports, split, check_seconds))
    elif _NOTHING_LEFT in statuses and not quiet:
        typer.echo("Pass --check to run ports up to their first step.", err=True)
    raise typer.Exit(max(statuses, default=_NOTHING_LEFT))


def _files(scripts: list[str]) -> list[str]:
    files: list[str] = []
    for script in scripts:
        if script != "-" and Path(script).is_dir():
            found = [*Path(script).rglob("*.py"), *Path(script).rglob("*.ipynb")]
            copies = ".ipynb_checkpoints"
            files += [str(path) for path in sorted(found) if copies not in path.parts]
        else:
            files.append(script)
    if not files:
        raise typer.BadParameter(f"There is no Python script in {', '.join(scripts)}.")
    return list(dict.fromkeys(files))


def _migrate(file: str, diff: bool, write: bool, quiet: bool, done: _Ports) -> int:
    """Port one script and add it to `done`; return the exit status."""
    from libcst import ParserSyntaxError

    from replicax_migrate import port, port_notebook

    name = "<stdin>" if file == "-" else file
    try:
        source = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        ported = port_notebook(source) if _is_notebook(file) else port(source)
    except OSError as error:
        typer.echo(f"{name}: cannot be read: {error.strerror}", err=True)
        return _UNREADABLE
    except SyntaxError as error:  # Only of the encoding; ParserSyntaxError is none.
        typer.echo(f"{name}:1: {error.msg}", err=True)
        return _UNREADABLE
    except ParserSyntaxError as error:
        line, column = error.raw_line, error.raw_column + 1
        typer.echo(f"{name}:{line}:{column}: {error.message}", err=True)
        return _UNREADABLE
    except RecursionError:
        typer.echo(f"{name}:1: its expressions are nested too deeply", err=True)
        return _UNREADABLE
    except ValueError as error:
        if not _is_notebook(file):
            raise
        typer.echo(f"{name}: cannot be read as a notebook: {error}", err=True)
        return _UNREADABLE
    done[file] = (source, ported)
    if diff:
        _print_diff(name, source, ported.source)
    elif write and file != "-":
        if ported.source != source:
            # A link stays one.
            write_whole(Path(file).resolve(), ported.source)
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(ported.source)
        sys.stdout.buffer.flush()
    _report(name, ported, quiet)
    return _SOMETHING_LEFT if ported.left else _NOTHING_LEFT


def _check(ports: _Ports, arguments: Sequence[str], limit_seconds: float) -> int:
    """Check the completely ported scripts by running them; return the exit status."""
    from replicax_migrate.check import check
    from replicax_migrate.notebooks import in_cells, script_of

    def code(file: str, text: bytes) -> str:
        return script_of(text) if _is_notebook(file) else text.decode()

    texts = {
        Path("stdin.py" if file == "-" else file).with_suffix(".py"): code(
            file, ported.source
        )
        for file, (_, ported) in ports.items()
    }
    status = _NOTHING_LEFT
    for path, (file, (source, ported)) in zip(texts, ports.items(), strict=True):
        if ported.left:
            typer.echo(f"{file}: not checked, as something is left", err=True)
            continue
        original = code(file, source)
        found = check(path, original, texts, arguments, limit_seconds)
        if found is None:
            typer.echo(f"{file}: checked", err=True)
        else:
            if _is_notebook(file):
                found = in_cells([found], original)[0]
            typer.echo(f"{file}:{found.place}: check: {found.reason}", err=True)
            status = _SOMETHING_LEFT
    return status


def _is_notebook(file: str) -> bool:
    return file.endswith(".ipynb")


def _print_diff(name: str, before: bytes, after: bytes) -> None:
    old, new = (x.decode("utf-8", "replace").splitlines(True) for x in (before, after))
    for line in difflib.unified_diff(old, new, name, name):
        text = (
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        )
        typer.secho(text, fg=_COLOURS.get(line[0]), nl=False)


def _report(name: str, ported: "Ported", quiet: bool) -> None:
    for finding in () if quiet else ported.notes:
        typer.echo(f"{name}:{finding.place}: note: {finding.reason}", err=True)
    for finding in ported.left:
        typer.echo(
            f"{name}:{finding.place}: left: {finding.reason}  [{finding.source}]",
            err=True,
        )
    number = len(ported.left)
    things = "1 thing is" if number == 1 else f"{number or 'nothing'} things are"
    things = things if number else "nothing is"
    typer.echo(f"{name}: {things} left to port by hand", err=True)
