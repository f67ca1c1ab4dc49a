"""`replicax info`: shows devices, versions and TF_CONFIG; recommends a strategy."""

import contextlib
import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replicax import __version__
from replicax.cluster.config import TaskConfig, tf_config
from replicax.errors import ClusterConfigError, DeviceError

if TYPE_CHECKING:
    from replicax.engine.devices import Device

__all__ = ["Recommendation", "fitting_strategy", "info"]

_PACKAGES = ("jax", "jaxlib", "keras", "numpy", "grain")
_VARIABLES = ("KERAS_BACKEND", "NPROC", "TF_CONFIG")


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommended strategy, the reason in one sentence, and notes."""

    strategy: str
    reason: str
    notes: tuple[str, ...] = ()


def info(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.")
    ] = False,
) -> None:
    """Show devices, versions and TF_CONFIG, and which strategy fits here.

    Exits with status 1 if TF_CONFIG is malformed or JAX finds no devices.
    """
    # Without preallocation: another process may be training on the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    system = _system_info()
    if as_json:
        typer.echo(json.dumps(system, indent=2))
    else:
        _print(system)
    if system["errors"]:
        raise typer.Exit(code=1)


def _system_info() -> dict[str, Any]:
    """Collect the object that `--json` prints."""
    errors: list[str] = []
    config = _tf_config(errors)
    devices = _local_devices(errors)
    # With an unreadable TF_CONFIG the cluster is unknown: recommend nothing.
    recommendation = None
    if not errors:
        platforms = [device.platform for device in devices]
        recommendation = asdict(fitting_strategy(platforms, config))
    return {
        "versions": {
            "replicax": __version__,
            **{name: _version_of(name) for name in _PACKAGES},
            "python": platform.python_version(),
        },
        "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
        "backend": devices[0].platform if devices else None,
        "devices": _device_groups(devices),
        "num_cores": os.cpu_count(),
        "tf_config": config
        and {
            "cluster": config.cluster.as_dict(),
            "fingerprint": config.cluster.fingerprint,
            "task_type": config.task_type,
            "task_index": config.task_id,
        },
        "recommendation": recommendation,
        "warnings": _pool_warnings(devices),
        "errors": errors,
    }


def _tf_config(errors: list[str]) -> TaskConfig | None:
    text = os.environ.get("TF_CONFIG", "").strip()
    try:
        return tf_config(text) if text else None
    except ClusterConfigError as error:
        errors.append(f"TF_CONFIG: {error.problem}.")
        return None


def _version_of(package: str) -> str:
    """A package's version; Keras' nightly is a package of another name."""
    for name in (package, f"{package}-nightly"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "not installed"


def _local_devices(errors: list[str]) -> "Sequence[Device]":
    import jax

    from replicax.engine.devices import before_start

    before_start()  # As strategies do: libtpu prints errors on machines without a TPU.
    try:
        return jax.local_devices()
    except (AssertionError, RuntimeError) as error:  # JAX raises either.
        platforms = os.environ.get("JAX_PLATFORMS")
        errors.append(f"JAX finds no devices; JAX_PLATFORMS={platforms!r}. {error}")
        return ()


def _device_groups(devices: "Sequence[Device]") -> list[dict[str, Any]]:
    # A CPU device has no statistics.
    groups = Counter(
        (d.platform, d.device_kind, (d.memory_stats() or {}).get("bytes_limit"))
        for d in devices
    )
    names = ("platform", "kind", "memory_limit_bytes")
    return [
        {**dict(zip(names, key, strict=True)), "count": count}
        for key, count in groups.items()
    ]


def _pool_warnings(devices: "Sequence[Device]") -> list[str]:
    from replicax.engine.devices import check_cpu_pool

    try:
        if devices:
            check_cpu_pool(devices)
    except DeviceError as error:
        return [str(error)]
    return []


def _print(system: dict[str, Any]) -> None:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")

    def add(name: str, value: object, style: str = "") -> None:
        rows.add_row(name, Text(str(value), style=style))  # Text: brackets stay as is.

    add("versions", ", ".join(f"{k} {v}" for k, v in system["versions"].items()))
    add("backend", f"JAX on {system['backend'] or 'nothing'}")
    for group in system["devices"]:
        add("devices", _describe_group(group))
    keras_backend, nproc, text = system["environment"].values()
    add("CPU", f"{system['num_cores']} cores, NPROC {nproc or 'not set'}")
    add("KERAS_BACKEND", keras_backend or "not set")
    add("TF_CONFIG", _describe_config(system["tf_config"], text))
    if choice := system["recommendation"]:
        add("fits here", choice["strategy"], "bold green")
        for line in (choice["reason"], *choice["notes"]):
            add("", line)
    for warning in system["warnings"]:
        add("warning", warning, "yellow")
    for error in system["errors"]:
        add("error", error, "red")
    Console().print(rows)


def _describe_group(group: dict[str, Any]) -> str:
    text = f"{group['count']} x {group['platform']} ({group['kind']})"
    memory = group["memory_limit_bytes"]
    return text if memory is None else f"{text}, {memory / 2**30:.1f} GiB each for JAX"


def _describe_config(config: dict[str, Any] | None, text: str) -> str:
    if config is None:
        short = text if len(text) <= 500 else f"{text[:500]}..."
        return f"malformed: {short}" if text.strip() else "not set (one machine)"
    jobs = ", ".join(f"{len(tasks)} {job}" for job, tasks in config["cluster"].items())
    if config["task_type"] is None:
        return f"cluster: {jobs or 'empty'}"
    # Equal on all machines of a cluster: people compare it by eye.
    cluster = f"cluster {config['fingerprint']}: {jobs or 'empty'}"
    return f"{cluster}; this process: {config['task_type']} {config['task_index']}"


def fitting_strategy(
    devices: Sequence[str], tf_config: TaskConfig | None = None
) -> Recommendation:
    """Choose the strategy for this process' platforms and its place in a cluster.

    Example:
        >>> fitting_strategy(["gpu", "gpu"]).strategy
        'MirroredStrategy'
        >>> fitting_strategy(["cpu"]).strategy
        'OneDeviceStrategy'
    """
    local = _on_one_machine(devices)
    if tf_config is None:
        return local
    if tf_config.task_type == "evaluator":
        return Recommendation(
            local.strategy,
            "TF_CONFIG makes this process the evaluator, which works beside the "
            f"cluster on its own devices: {local.reason}",
            local.notes,
        )
    cluster = tf_config.cluster
    num_workers = len(cluster.workers)
    if "ps" in cluster.jobs:
        return Recommendation(
            "ParameterServerStrategy",
            f"TF_CONFIG has parameter servers ({cluster.num_tasks('ps')}) for "
            f"{_count(num_workers, 'worker')}: they hold the variables, and the "
            "workers train asynchronously.",
        )
    if num_workers > 1:
        return Recommendation(
            "MultiWorkerMirroredStrategy",
            f"TF_CONFIG has {num_workers} workers: each mirrors the variables on its "
            "devices, and all train in step.",
        )
    return local


def _on_one_machine(devices: Sequence[str]) -> Recommendation:
    platforms = [d for d in devices if d != "cpu"] or list(devices)
    platform, num_devices = platforms[0], len(platforms)
    if platform == "tpu":
        count = _count(num_devices, "TPU device")
        return Recommendation("TPUStrategy", f"This process has {count}.")
    if num_devices == 1:
        return Recommendation(
            "OneDeviceStrategy",
            f"One machine with one device ({platform}): there is nothing to mirror.",
            ("The default strategy, with no scope at all, trains the same way.",),
        )
    if platform == "cpu":
        return Recommendation(
            "MirroredStrategy",
            f"One machine with {num_devices} logical CPU devices: a replica on each.",
            ("They share the cores: good for testing, not for speed.",),
        )
    return Recommendation(
        "MirroredStrategy",
        f"One machine with {num_devices} accelerators ({platform}): a replica on "
        "each, with little communication between them.",
        (
            "Where device memory is short, CentralStorageStrategy keeps the variables "
            "and the optimizer state on one device.",
        ),
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
