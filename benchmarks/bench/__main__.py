"""`python -m bench`, in this folder: step times beside other libraries."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from bench.accelerators import gpu_name
from bench.entries import (
    LAYOUTS,
    Environment,
    Layout,
    cases_of,
    entries_of,
)
from bench.environments import EnvironmentMissingError, named_pythons, python_of
from bench.peers.cases import CASES
from bench.plots import draw
from bench.processes import PeerError
from bench.rounds import measure
from bench.tables import disagreeing, markdown

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def bench(
    cases: Annotated[
        str,
        typer.Option(
            help="Letters of the cases: "
            + ", ".join(f"{key} {case.title}" for key, case in CASES.items())
            + ". By default those that the layouts have."
        ),
    ] = "".join(CASES),
    layouts: Annotated[
        str,
        typer.Option(
            help=f"Some of {', '.join(LAYOUTS)}; gpu has the cases {cases_of('gpu')}, "
            f"the others {cases_of('one')}."
        ),
    ] = "one,logical,processes",
    starts: Annotated[int, typer.Option(min=1, help="Starts of each entry.")] = 3,
    rounds: Annotated[
        int, typer.Option(min=1, help="Measurements of each after a start.")
    ] = 3,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="About how long one measurement takes.")
    ] = 1.0,
    output: Annotated[
        Path, typer.Option(help="Folder for the tables, the JSON and the pictures.")
    ] = Path("bench-results"),
    peers: Annotated[
        Path, typer.Option(help="Folder for the peers' virtual environments.")
    ] = Path(".bench"),
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="An interpreter that has the peer tensorflow or torch, instead of "
            "installing it. May be given for each.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what was measured before.")
    ] = False,
    limit_seconds: Annotated[
        float, typer.Option(min=1, help="A peer that takes longer is left out.")
    ] = 600.0,
) -> None:
    """Measure steps beside bare JAX, Keras, tf.distribute and torch, in turns.

    Peers that are not installed are installed first, each in an environment of its own.
    A peer that cannot be installed or fails is left out and named. On a GPU, torch is
    taken from this Python or the one named. Linux only.

    Exits with status 1 if nothing could be measured in some group.
    """
    wanted = _groups(cases, layouts)
    if not hasattr(os, "sched_getaffinity") or shutil.which("taskset") is None:
        raise typer.BadParameter("This needs Linux and its command taskset.")
    raw = output / "raw"
    try:
        given = named_pythons(python or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raw.mkdir(parents=True, exist_ok=True)
    gpu = _gpu(wanted)
    if gpu is None:
        wanted = [group for group in wanted if group[1] != "gpu"]
    pythons = {
        on_gpu: _pythons(
            [group for group in wanted if (group[1] == "gpu") == on_gpu],
            peers,
            given,
            on_gpu,
        )
        for on_gpu in (False, True)
    }
    failed = not wanted
    for case, layout in wanted:
        file = raw / f"{case}_{layout}.json"
        if resume and file.exists():
            continue
        typer.echo(f"({case}) {CASES[case].title}, {LAYOUTS[layout]}")
        try:
            group = measure(
                case,
                layout,
                pythons[layout == "gpu"],
                starts=starts,
                rounds=rounds,
                seconds=seconds,
                limit_seconds=limit_seconds,
                tell=typer.echo,
                gpu=gpu if layout == "gpu" else None,
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
    known: list[Layout] = [cast(Layout, layout) for layout in chosen]
    groups: list[tuple[str, Layout]] = [
        (case, layout) for layout in known for case in cases if case in cases_of(layout)
    ]
    unused = set(cases) - {case for case, _ in groups}
    if unused and cases != "".join(CASES):  # All is what was not asked for by name.
        raise typer.BadParameter(
            f"The layouts {chosen} have no cases {sorted(unused)}."
        )
    return groups


def _gpu(wanted: list[tuple[str, Layout]]) -> str | None:
    """The GPU's name, if one is wanted and there is one."""
    if not any(layout == "gpu" for _, layout in wanted):
        return None
    try:
        name = gpu_name()
    except subprocess.TimeoutExpired as error:
        typer.echo(f"Layout gpu is left out: the GPU did not answer. {error}", err=True)
        return None
    if name is None:
        typer.echo("Layout gpu is left out: JAX finds no CUDA device here.", err=True)
    return name


def _pythons(
    wanted: list[tuple[str, Layout]],
    folder: Path,
    given: Mapping[str, str],
    on_gpu: bool,
) -> dict[str, str]:
    environments: dict[Environment, None] = dict.fromkeys(
        entry.environment for group in wanted for entry in entries_of(*group)
    )
    found = {}
    for environment in environments:
        if environment in given:
            found[environment] = given[environment]
            continue
        try:
            found[environment] = python_of(
                environment, folder, typer.echo, on_gpu=on_gpu
            )
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
        typer.echo("No pictures: pip install matplotlib", err=True)


if __name__ == "__main__":
    app(prog_name="python -m bench")
