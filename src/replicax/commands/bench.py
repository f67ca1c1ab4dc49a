"""`replicax bench`: step times beside other libraries."""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from replicax.bench.entries import LAYOUTS, Environment, Layout, entries_of
from replicax.bench.environments import EnvironmentMissingError, python_of
from replicax.bench.peers.cases import CASES
from replicax.bench.plots import draw
from replicax.bench.processes import PeerError
from replicax.bench.rounds import measure
from replicax.bench.tables import disagreeing, markdown

__all__ = ["bench"]


def bench(
    cases: Annotated[
        str,
        typer.Option(
            help="Letters of the cases: "
            + ", ".join(f"{key} {case.title}" for key, case in CASES.items())
            + "."
        ),
    ] = "".join(CASES),
    layouts: Annotated[
        str, typer.Option(help=f"Some of {', '.join(LAYOUTS)}.")
    ] = ",".join(LAYOUTS),
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each.")] = 7,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="About how long one measurement takes.")
    ] = 1.0,
    output: Annotated[
        Path, typer.Option(help="Folder for the tables, the JSON and the pictures.")
    ] = Path("bench-results"),
    peers: Annotated[
        Path, typer.Option(help="Folder for the peers' virtual environments.")
    ] = Path(".bench"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what was measured before.")
    ] = False,
    limit_seconds: Annotated[
        float, typer.Option(min=1, help="A peer that takes longer is left out.")
    ] = 600.0,
) -> None:
    """Measure steps beside bare JAX, Keras, tf.distribute and torch, in turns.

    Peers that are not installed are installed first, each in an environment of its own.
    A peer that cannot be installed or fails is left out and named. Linux only.

    Exits with status 1 if nothing could be measured in some group.
    """
    wanted = _groups(cases, layouts)
    if not hasattr(os, "sched_getaffinity") or shutil.which("taskset") is None:
        raise typer.BadParameter("This needs Linux and its command taskset.")
    raw = output / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    pythons = _pythons(wanted, peers)
    failed = False
    for case, layout in wanted:
        file = raw / f"{case}_{layout}.json"
        if resume and file.exists():
            continue
        typer.echo(f"({case}) {CASES[case].title}, {LAYOUTS[layout]}")
        try:
            group = measure(
                case,
                layout,
                pythons,
                rounds=rounds,
                seconds=seconds,
                limit_seconds=limit_seconds,
                tell=typer.echo,
            )
        except PeerError as error:
            typer.echo(f"  Not measured: {error}", err=True)
            failed = True
            continue
        file.write_text(json.dumps(group, indent=1) + "\n", encoding="utf-8")
        for name, what in {**group["left_out"], **disagreeing(group)}.items():
            typer.echo(f"  {name}: {what}", err=True)
        _write(output)
    _write(output)
    raise typer.Exit(int(failed))


def _groups(cases: str, layouts: str) -> list[tuple[str, Layout]]:
    chosen = [name.strip() for name in layouts.split(",")]
    if unknown := set(cases) - set(CASES):
        raise typer.BadParameter(f"There are no cases {sorted(unknown)}.")
    if unknown := set(chosen) - set(LAYOUTS):
        raise typer.BadParameter(f"There are no layouts {sorted(unknown)}.")
    return [(case, cast(Layout, layout)) for layout in chosen for case in cases]


def _pythons(wanted: list[tuple[str, Layout]], folder: Path) -> dict[str, str]:
    environments: dict[Environment, None] = dict.fromkeys(
        entry.environment for group in wanted for entry in entries_of(*group)
    )
    found = {}
    for environment in environments:
        try:
            found[environment] = python_of(environment, folder, typer.echo)
        except EnvironmentMissingError as error:
            typer.echo(f"No {environment}: {error}", err=True)
    return found


def _write(output: Path) -> None:
    """The page and the pictures of all that is there."""
    groups: list[dict[str, Any]] = [
        json.loads(file.read_text(encoding="utf-8"))
        for file in sorted((output / "raw").glob("*.json"))
    ]
    if not groups:
        return
    (output / "README.md").write_text(markdown(groups), encoding="utf-8")
    try:
        draw(groups, output)
    except ModuleNotFoundError:
        typer.echo("No pictures: pip install 'replicax[bench]'", err=True)
