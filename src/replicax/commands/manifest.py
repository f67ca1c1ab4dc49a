"""`replicax manifest`: prints the Kubernetes manifest of a training job."""

from typing import Annotated

import typer

from replicax.commands.arguments import warn_of_late_options
from replicax.launch.manifest import TrainingJob, jobset, to_yaml

__all__ = ["manifest"]


def _variables(assignments: list[str]) -> dict[str, str]:
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise typer.BadParameter(
                f"{assignment!r} is not of the form NAME=VALUE.", param_hint="--env"
            )
        variables[name] = value
    return variables


def manifest(
    context: typer.Context,
    image: Annotated[
        str, typer.Option(help="Container image with the script and its packages.")
    ],
    workers: Annotated[int, typer.Option(help="Number of workers.")],
    script: Annotated[
        str, typer.Argument(help="Path of the script in the image, or module with -m.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module, like `python -m`.")
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "train",
    namespace: Annotated[str | None, typer.Option(help="Namespace of the job.")] = None,
    chief: Annotated[bool, typer.Option("--chief", help="Add a chief.")] = False,
    ps: Annotated[int, typer.Option(help="Number of parameter servers.")] = 0,
    evaluator: Annotated[
        bool, typer.Option("--evaluator", help="Add an evaluator.")
    ] = False,
    gpus_per_worker: Annotated[
        int, typer.Option(help="GPUs of each chief, worker and evaluator.")
    ] = 0,
    cpus: Annotated[
        str | None, typer.Option(help="CPU cores of each container, such as 4 or 500m.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each container, such as 8Gi.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port on which tasks find each other.")] = (
        2222
    ),
    max_restarts: Annotated[
        int, typer.Option(help="Number of restarts of all tasks.")
    ] = 3,
    grace_seconds: Annotated[
        int, typer.Option(help="Seconds between SIGTERM and SIGKILL.")
    ] = 60,
    checkpoint_claim: Annotated[
        str | None, typer.Option(help="Persistent volume claim for checkpoints.")
    ] = None,
    checkpoint_path: Annotated[
        str | None,
        typer.Option(help="Where the containers mount the claim. [default: /ckpt]"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, a variable of the containers. Repeatable."),
    ] = None,
    python: Annotated[str, typer.Option(help="Python in the image.")] = "python",
) -> None:
    """Print a Kubernetes JobSet that runs a training script on several workers.

    Apply it with `replicax manifest ... train.py | kubectl apply -f -`.
    """
    warn_of_late_options(context, arguments or [])
    if checkpoint_path is not None and checkpoint_claim is None:
        raise typer.BadParameter(
            f"{checkpoint_path!r} needs a volume; name one with --checkpoint-claim.",
            param_hint="--checkpoint-path",
        )
    start = (python, "-m", script) if module else (python, script)
    try:
        job = TrainingJob(
            image=image,
            command=(*start, *(arguments or [])),
            num_workers=workers,
            name=name,
            namespace=namespace,
            chief=chief,
            num_ps=ps,
            evaluator=evaluator,
            gpus_per_worker=gpus_per_worker,
            cpus=cpus,
            memory=memory,
            port=port,
            max_restarts=max_restarts,
            grace_seconds=grace_seconds,
            checkpoint_claim=checkpoint_claim,
            checkpoint_path=checkpoint_path or "/ckpt",
            env=_variables(env or []),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(to_yaml(jobset(job)), nl=False)
