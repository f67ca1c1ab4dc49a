"""`replicax monitor`: serves the live report of a training to a browser."""

from pathlib import Path
from typing import Annotated

import typer

from replicax.report.journal import folder_of
from replicax.report.serving import ReportServer

__all__ = ["monitor"]


def monitor(
    path: Annotated[Path, typer.Argument(help="The page that Report was given.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on this machine; 0: a free one.")
    ] = 0,
) -> None:
    """Serve a live training report on this machine's loopback address.

    It reads the files that workers write beside the page, and the browser refreshes.
    Other machines cannot reach it. Ctrl-C ends it.
    """
    path = path.expanduser()
    if path.is_dir():
        raise typer.BadParameter(
            f"{str(path)!r} is a folder. Give the page's file, as Report was given it"
            f"{_pages_in(path)}."
        )
    try:
        server = ReportServer(path, port)
    except OSError as error:
        raise typer.BadParameter(
            f"Port {port} cannot be used ({error.strerror}). Leave --port out for a "
            "free one.",
            param_hint="--port",
        ) from error
    with server:
        try:
            _say_where(path, server.url)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("")


def _pages_in(folder: Path) -> str:
    """List the report pages in a folder, as the end of a sentence."""
    pages = [f.with_name(f.name.removesuffix(".d")) for f in folder.glob("*.d")]
    names = sorted(str(page) for page in pages if folder_of(page).is_dir())
    return f": {', '.join(names)}" if names else ""


def _say_where(path: Path, url: str) -> None:
    if not folder_of(path).is_dir():
        typer.echo(f"{folder_of(path)} is not there yet; waiting for it.", err=True)
    typer.echo(f"Training report {path}: {url}  (Ctrl-C ends this)")
