"""`replicax migrate`: ports tf.distribute scripts to replicax."""

import difflib
import enum
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeAlias

import typer

# Each call of `replicax` imports this module; most calls do not need LibCST.
if TYPE_CHECKING:
    from replicax_migrate import Ported

_Ports: TypeAlias = "dict[str, tuple[bytes, Ported]]"

__all__ = ["Status", "migrate"]


class Status(enum.IntEnum):
    """The exit status of the command; of several scripts, the worst."""

    RUN = 0
    """Every name is ported, and the first training step was executed."""
    LEFT = 1
    """Code is left to port by hand, or the ported script fails."""
    NOT_RUN = 2
    """Every name is ported, but no training step was executed."""
    UNREADABLE = 3
    """A script cannot be read or is not Python, or the command line is wrong."""


_FROM_GOOD_TO_BAD = (Status.RUN, Status.NOT_RUN, Status.LEFT, Status.UNREADABLE)


def migrate(
    scripts: Annotated[
        list[str],
        typer.Argument(
            help="Python scripts, notebooks, folders, or - for standard input."
        ),
    ],
    diff: Annotated[bool, typer.Option("--diff", help="Print the changes.")] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Change the scripts in place.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="Print no notes, only the code that is left."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Run each ported script up to its first training step."
        ),
    ] = False,
    arguments: Annotated[
        str, typer.Option("--arguments", help="Arguments that --check passes on.")
    ] = "",
    check_seconds: Annotated[
        float,
        typer.Option(
            "--check-seconds",
            min=0.1,
            help="The time after which --check stops a script and reports it.",
        ),
    ] = 600.0,
) -> None:
    """Port tf.distribute scripts to replicax, Keras 3 and Grain.

    Prints the ported script, and on standard error a report of the code that is left to
    port by hand, with line numbers of the original. In the ported script, comments that
    begin with "# replicax:" mark this code.

    With --check, each script without such code runs on CPUs until it has executed a
    training step. The report shows an error by its line in the original.

    Exits with status 0 if no code is left and a training step was executed, with 1 if
    code is left or the run failed, with 2 if no code is left and no training step was
    executed, and with 3 if a script cannot be read or is not Python.
    """
    if diff and write:
        _refuse("--diff and --write exclude each other: pass one of them.")
    files = _files(scripts)
    if len(files) > 1 and not (diff or write):
        _refuse(f"got {len(files)} scripts: pass --diff or --write.")
    ports: _Ports = {}
    statuses = {file: _migrate(file, diff, write, quiet, ports) for file in files}
    if check:
        statuses |= _check(ports, shlex.split(arguments), check_seconds)
    elif Status.NOT_RUN in statuses.values() and not quiet:
        typer.echo("Pass --check to run ports up to their first step.", err=True)
    raise typer.Exit(max(statuses.values(), key=_FROM_GOOD_TO_BAD.index))


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"Error: {reason}", err=True)
    raise typer.Exit(Status.UNREADABLE)


def _files(scripts: list[str]) -> list[str]:
    files: list[str] = []
    for script in scripts:
        if script != "-" and Path(script).is_dir():
            paths = [*Path(script).rglob("*.py"), *Path(script).rglob("*.ipynb")]
            copies = ".ipynb_checkpoints"
            files += [str(path) for path in sorted(paths) if copies not in path.parts]
        else:
            files.append(script)
    if not files:
        _refuse(f"there is no Python script in {', '.join(scripts)}.")
    return list(dict.fromkeys(files))


def _migrate(file: str, diff: bool, write: bool, quiet: bool, ports: _Ports) -> Status:
    """Port one script, add it to `ports`, and return its status before a check."""
    name = "<stdin>" if file == "-" else file
    result = _port_file(file)
    if isinstance(result, str):
        typer.echo(f"{name}:{result}", err=True)
        return Status.UNREADABLE
    source, ported = result
    ports[file] = (source, ported)
    if diff:
        _print_diff(name, source, ported.source)
    elif write and file != "-":
        if ported.source != source:
            _replace(Path(file).resolve(), ported.source)  # A link stays a link.
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(ported.source)
        sys.stdout.buffer.flush()
    _report(name, ported, quiet)
    return Status.LEFT if ported.left else Status.NOT_RUN


def _port_file(file: str) -> "tuple[bytes, Ported] | str":
    """The text of a script and its port, or an error message."""
    from libcst import ParserSyntaxError

    from replicax_migrate import port, port_notebook

    try:
        source = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return source, port_notebook(source) if _is_notebook(file) else port(source)
    except OSError as error:
        return f" cannot be read: {error.strerror}"
    except SyntaxError as error:  # A wrong encoding.
        return f"1: {error.msg}"
    except ParserSyntaxError as error:
        return f"{error.raw_line}:{error.raw_column + 1}: {error.message}"
    except RecursionError:
        return "1: its expressions are nested too deeply"
    except ValueError as error:
        if not _is_notebook(file):
            raise
        return f" cannot be read as a notebook: {error}"


def _replace(path: Path, text: bytes) -> None:
    """Replace a file atomically; keep its mode."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(text)
    shutil.copymode(path, temporary)
    temporary.replace(path)


def _check(
    ports: _Ports, arguments: Sequence[str], limit_seconds: float
) -> dict[str, Status]:
    """Run the scripts without code to port by hand; return their statuses."""
    from replicax_migrate.check import check
    from replicax_migrate.notebooks import in_cells

    texts = {_path(file): _code(file, new.source) for file, (_, new) in ports.items()}
    statuses: dict[str, Status] = {}
    for file, (source, ported) in ports.items():
        if ported.left:
            typer.echo(f"{file}: not checked, since code is left to port", err=True)
            continue
        original = _code(file, source)
        status, error = check(_path(file), original, texts, arguments, limit_seconds)
        statuses[file] = status
        if status is Status.RUN:
            typer.echo(f"{file}: checked", err=True)
            continue
        if _is_notebook(file):
            (error,) = in_cells([error], original)
        label = "check" if status is Status.LEFT else "not checked"
        typer.echo(f"{file}:{error.place}: {label}: {error.reason}", err=True)
    return statuses


def _path(file: str) -> Path:
    return Path("stdin.py" if file == "-" else file).with_suffix(".py")


def _code(file: str, text: bytes) -> str:
    from replicax_migrate.notebooks import script_of

    return script_of(text) if _is_notebook(file) else text.decode()


def _is_notebook(file: str) -> bool:
    return file.endswith(".ipynb")


def _print_diff(name: str, before: bytes, after: bytes) -> None:
    old, new = (x.decode("utf-8", "replace").splitlines(True) for x in (before, after))
    for line in difflib.unified_diff(old, new, name, name):
        typer.echo(line.removesuffix("\n"))


def _report(name: str, ported: "Ported", quiet: bool) -> None:
    for finding in () if quiet else ported.notes:
        typer.echo(f"{name}:{finding.place}: note: {finding.reason}", err=True)
    for finding in ported.left:
        text = f"left: {finding.reason}  [{finding.source}]"
        typer.echo(f"{name}:{finding.place}: {text}", err=True)
    n = len(ported.left)
    things = {0: "nothing is", 1: "1 thing is"}.get(n, f"{n} things are")
    typer.echo(f"{name}: {things} left to port by hand", err=True)
