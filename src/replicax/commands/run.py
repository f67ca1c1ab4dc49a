"""`replicax run`: runs all tasks of a cluster on this machine."""

import enum
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from replicax._util.arguments import require_path
from replicax._util.gpus import CUDA_VISIBLE_DEVICES
from replicax.commands.arguments import require_script, warn_of_late_options
from replicax.cpu.settings import cpu_pool_size, keep_loops
from replicax.launch.failures import RestartPolicy
from replicax.launch.gang import ClusterCommand
from replicax.launch.launcher import launch
from replicax.launch.local_tasks import (
    check_tasks,
    divide_cores,
    divide_gpus,
    ps_token,
    task_names,
)
from replicax.report.journal import REPORT

__all__ = ["RestartOn", "run"]


class RestartOn(enum.Enum):
    """The failures after which tasks restart."""

    TRANSIENT = "transient"
    ANY = "any"


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script, or module with -m.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module, like `python -m`.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Number of workers.")] = 1,
    chief: Annotated[bool, typer.Option("--chief", help="Add a chief.")] = False,
    ps: Annotated[int, typer.Option(min=0, help="Number of parameter servers.")] = 0,
    evaluator: Annotated[
        bool, typer.Option("--evaluator", help="Add an evaluator.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of restarts of all tasks; with --ps, of each task.",
        ),
    ] = 3,
    backoff_seconds: Annotated[
        float,
        typer.Option(min=0, help="Seconds before the first restart; doubles up to 60."),
    ] = 1.0,
    restart_on: Annotated[
        RestartOn,
        typer.Option(
            help="Restart after failures that may pass, such as a killed task, or "
            "after all failures.",
        ),
    ] = RestartOn.TRANSIENT,
    grace_seconds: Annotated[
        float,
        typer.Option(min=0, help="Seconds between SIGTERM and SIGKILL of a task."),
    ] = 30.0,
    evaluator_seconds: Annotated[
        float,
        typer.Option(min=0, help="Seconds until an evaluator ends after training."),
    ] = 600.0,
    cores_per_worker: Annotated[
        int | None,
        typer.Option(min=1, help="Pin each worker to this many cores of its own."),
    ] = None,
    logical_devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of CPU devices of each task; by default one, unless the "
            "script sets another.",
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Report every fit, and say what limits its speed."
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Like --profile, into this page instead of replicax-report.html."
        ),
    ] = None,
) -> None:
    """Run a training script as all tasks of a cluster on this machine.

    Options come before the script, and the script's own arguments after it:
    `replicax run --workers 2 train.py --epochs 3`.

    Each task gets its TF_CONFIG. When a task fails, the others are ended. If the failed
    task was killed, or has lost another task (exit status 128 or more), all tasks start
    again. After an exception of the script, the job ends. With parameter servers, a
    failed task starts again alone. The exit status is that of the task that failed
    first.

    Several workers divide the GPUs of this machine equally.
    """
    if not module:
        require_script(script)
    warn_of_late_options(context, arguments or [])
    jobs = {"chief": int(chief), "worker": workers, "ps": ps, "evaluator": evaluator}
    if not chief and not workers:
        raise typer.BadParameter("A cluster needs a worker or a chief; it has neither.")
    num_tasks = check_tasks({job: int(n) for job, n in jobs.items()}, "replicax run")
    # Parameter servers and evaluators are not pinned.
    pinned = [n for n in task_names(num_tasks) if n.startswith(("chief", "worker"))]
    try:
        cores = divide_cores(pinned, cores_per_worker) if cores_per_worker else {}
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error), param_hint="--cores-per-worker") from error
    environment = _environment(logical_devices)
    if profile or report is not None:
        environment[REPORT] = _page(report or Path("replicax-report.html"))
    start = [sys.executable, "-m", script] if module else [sys.executable, script]
    gpus = divide_gpus(num_tasks, environment)
    if gpus:
        own = [f"{n}: {gpus[n][CUDA_VISIBLE_DEVICES]}" for n in pinned]
        typer.echo(f"replicax run: each task has GPUs of its own: {own}", err=True)
    command = ClusterCommand(
        command=[*start, *(arguments or [])],
        num_tasks=num_tasks,
        environment=environment | ps_token(num_tasks, environment),
        variables=gpus,
        cores=cores,
        grace_seconds=grace_seconds,
        evaluator_seconds=evaluator_seconds,
    )
    policy = RestartPolicy(
        max_restarts=max_restarts,
        backoff_seconds=backoff_seconds,
        on_any=restart_on is RestartOn.ANY,
    )
    raise typer.Exit(launch(command, policy))


def _page(path: Path) -> str:
    try:
        require_path(path, "the report's path")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--report") from None
    path = path.expanduser()
    if path.is_dir():
        raise typer.BadParameter(f"{str(path)!r} is a folder.", param_hint="--report")
    return str(path.absolute())


def _environment(logical_devices: int | None) -> dict[str, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # For scripts that import keras before replicax.
    environment.setdefault("KERAS_BACKEND", "jax")
    if logical_devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(logical_devices)
        environment["NPROC"] = str(cpu_pool_size(logical_devices))
    keep_loops(environment)
    return environment
