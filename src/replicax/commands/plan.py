"""`replicax plan`: estimates a script's training step on other hardware."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from replicax.commands.arguments import require_script, warn_of_late_options
from replicax.errors import DeviceError
from replicax.planning import compiler

__all__ = ["plan"]


def plan(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script, or module with -m.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module, like `python -m`.")
    ] = False,
    topology: Annotated[
        str,
        typer.Option(
            help="TPU slice such as v5e:2x4, NVIDIA GPUs such as h100:8 or h100:4x8 "
            "(hosts x cards), or cpu:N or gpu:N of this machine."
        ),
    ] = "v5e:16x16",
    slices: Annotated[int, typer.Option(min=1, help="Number of TPU slices.")] = 1,
    link_bandwidth: Annotated[
        float | None,
        typer.Option(
            help="Bytes per second that a device sends to the others of its slice or "
            "host, such as 450e9; by default the published figure."
        ),
    ] = None,
    network_bandwidth: Annotated[
        float | None,
        typer.Option(
            help="Bytes per second that a device sends over the network, such as "
            "50e9; by default its share of the published figure."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the estimate to this file.")
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw times and scaling to this file, such as plan.png."),
    ] = None,
) -> None:
    """Compile a script's training step for other hardware, without running it.

    Options come before the script, and the script's own arguments after it:
    `replicax plan --topology v5e:2x4 train.py --epochs 3`.

    The script runs on this machine up to its first training step, with a strategy on
    the topology's devices. The command compiles this step for them, and prints its
    FLOPs, bytes, memory and collectives, predicted times, and the bottleneck.
    """
    from replicax.planning.topology import check_topology  # Imports JAX.

    if not module:
        require_script(script)
    warn_of_late_options(context, arguments or [])
    try:
        check_topology(
            topology,
            slices,
            link_bandwidth=link_bandwidth,
            network_bandwidth=network_bandwidth,
        )
    except DeviceError as error:
        raise typer.BadParameter(str(error), param_hint="--topology") from error
    for file in (json_file, figure):
        if file is not None and not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"There is no folder for {str(file)!r}.")
    _require_matplotlib(figure)
    environment = _environment(topology)
    options = {k: x for k, x in context.params.items() if k != "arguments"}
    command = [
        sys.executable,
        "-m",
        "replicax.planning",
        json.dumps(options, default=str),
    ]
    # A process of its own: JAX reads its environment when it starts.
    ended = subprocess.run(
        [*command, script, *(arguments or [])],
        env=environment,
        check=False,
    )
    raise typer.Exit(ended.returncode if ended.returncode >= 0 else 1)


def _require_matplotlib(figure: Path | None) -> None:
    if figure is not None and importlib.util.find_spec("matplotlib") is None:
        typer.echo(
            "Error: --figure needs the package matplotlib, which is not installed. "
            "Install it with: pip install 'replicax[plan]'",
            err=True,
        )
        raise typer.Exit(1)


def _environment(topology: str) -> dict[str, str]:
    from replicax.planning.cards import Card  # Imports JAX.
    from replicax.planning.topology import described_chip

    environment = dict(os.environ)
    if not topology.startswith("gpu:"):
        environment["JAX_PLATFORMS"] = "cpu"
    try:
        chip = described_chip(topology)
        if isinstance(chip, Card):
            compiler.require_cuda(topology)
        elif chip is not None:
            environment["TPU_SKIP_MDS_QUERY"] = "1"
            environment[compiler.LIBRARY_PATH] = str(compiler.require_libtpu(topology))
    except ImportError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    return environment
