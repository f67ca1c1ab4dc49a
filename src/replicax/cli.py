"""The command line: `replicax info`."""

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replicax import __version__
from replicax.cluster.config import TaskConfig, tf_config
from replicax.commands.manifest import manifest
from replicax.commands.migrate import migrate
from replicax.commands.monitor import monitor
from replicax.commands.plan import plan
from replicax.commands.recommend import fitting_strategy
from replicax.commands.run import run
from replicax.errors import ClusterConfigError, DeviceError

__all__ = ["app", "main"]

_PACKAGES = ("jax", "jaxlib", "keras", "numpy", "grain")
_VARIABLES = ("KERAS_BACKEND", "NPROC", "TF_CONFIG")

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


app.command()(migrate)
# What follows the script belongs to the script.
app.command(context_settings={"allow_interspersed_args": False})(manifest)
app.command()(monitor)
app.command(context_settings={"allow_interspersed_args": False})(plan)
app.command(context_settings={"allow_interspersed_args": False})(run)


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


@app.command()
def info(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.")
    ] = False,
) -> None:
    """Show devices, versions and TF_CONFIG, and which strategy fits here.

    Exits with status 1 if TF_CONFIG is malformed or JAX finds no devices.
    """
    # Looking must not take the memory of a GPU on which something else is training.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report = _report()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report)
    if report["errors"]:
        raise typer.Exit(code=1)


def _report() -> dict[str, Any]:
    errors: list[str] = []
    config = _tf_config(errors)
    devices = _local_devices(errors)
    # A cluster that could not be read is unknown, not absent: recommend nothing then.
    fits = None
    if not errors:
        choice = fitting_strategy([d.platform for d in devices], config)
        fits = asdict(choice)
    return {
        "versions": {
            "replicax": __version__,
            **{name: metadata.version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        },
        "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
        "backend": devices[0].platform if devices else None,
        "devices": _device_groups(devices),
        "num_cores": os.cpu_count(),
        "tf_config": None if config is None else _as_data(config),
        "recommendation": fits,
        "warnings": _pool_warnings(devices),
        "errors": errors,
    }


def _tf_config(errors: list[str]) -> TaskConfig | None:
    text = os.environ.get("TF_CONFIG", "").strip()
    try:
        return tf_config(text) if text else None
    except ClusterConfigError as error:
        errors.extend(f"TF_CONFIG: {problem}." for problem in error.problems)
        return None


def _as_data(config: TaskConfig) -> dict[str, Any]:
    return {
        "cluster": config.cluster.as_dict(),
        "fingerprint": config.cluster.fingerprint,
        "task_type": config.task_type,
        "task_index": config.task_id,
    }


def _local_devices(errors: list[str]) -> Sequence[Any]:
    import jax

    try:
        return jax.local_devices()
    except (AssertionError, RuntimeError) as error:  # JAX raises either.
        platforms = os.environ.get("JAX_PLATFORMS")
        errors.append(f"JAX finds no devices; JAX_PLATFORMS={platforms!r}. {error}")
        return ()


def _device_groups(devices: Sequence[Any]) -> list[dict[str, Any]]:
    # The limit is what JAX may allocate; a CPU device has no statistics.
    groups = Counter(
        (d.platform, d.device_kind, (d.memory_stats() or {}).get("bytes_limit"))
        for d in devices
    )
    names = ("platform", "kind", "memory_limit_bytes")
    return [
        {**dict(zip(names, group, strict=True)), "count": count}
        for group, count in groups.items()
    ]


def _pool_warnings(devices: Sequence[Any]) -> list[str]:
    from replicax.engine.devices import check_cpu_pool

    try:
        if devices:
            check_cpu_pool(devices)
    except DeviceError as error:
        return [str(error)]
    return []


def _show(report: dict[str, Any]) -> None:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")

    def add(name: str, value: object, style: str = "") -> None:
        rows.add_row(name, Text(str(value), style=style))  # Text: brackets stay as is.

    add("versions", ", ".join(f"{k} {v}" for k, v in report["versions"].items()))
    add("backend", f"JAX on {report['backend'] or 'nothing'}")
    for group in report["devices"]:
        add("devices", _describe_group(group))
    keras_backend, nproc, text = report["environment"].values()
    add("CPU", f"{report['num_cores']} cores, NPROC {nproc or 'not set'}")
    add("KERAS_BACKEND", keras_backend or "not set")
    add("TF_CONFIG", _describe_config(report["tf_config"], text))
    if choice := report["recommendation"]:
        add("fits here", choice["strategy"], "bold green")
        add("", choice["reason"])
        for note in choice["notes"]:
            add("", note)
    for warning in report["warnings"]:
        add("warning", warning, "yellow")
    for error in report["errors"]:
        add("error", error, "red")
    Console().print(rows)


def _describe_group(group: dict[str, Any]) -> str:
    text = f"{group['count']} x {group['platform']} ({group['kind']})"
    if group["memory_limit_bytes"] is None:
        return text
    return f"{text}, {group['memory_limit_bytes'] / 2**30:.1f} GiB each for JAX"


def _describe_config(config: dict[str, Any] | None, text: str) -> str:
    if config is None:
        return _malformed(text) if text.strip() else "not set (one machine)"
    jobs = ", ".join(f"{len(tasks)} {job}" for job, tasks in config["cluster"].items())
    if config["task_type"] is None:
        return f"cluster: {jobs or 'empty'}"
    # Equal on all machines of a cluster: people compare it by eye.
    cluster = f"cluster {config['fingerprint']}: {jobs or 'empty'}"
    task = f"{config['task_type']} {config['task_index']}"
    return f"{cluster}; this process: {task}"


def _malformed(text: str) -> str:
    return f"malformed: {text if len(text) <= 500 else f'{text[:500]}...'}"
