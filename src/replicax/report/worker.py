"""Describes the worker of a reported training, and the training's configuration."""

import platform
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Protocol

import jax
import keras

from replicax._private.keras import inner_of
from replicax._util.types import JSON
from replicax._version import versions
from replicax.engine.devices import Device
from replicax.jax_loops.optax_optimizer import rate_of
from replicax.strategies.strategy import Strategy

__all__ = ["ReportedWorker", "facts_of", "local_devices"]


class ServerSession(Protocol):
    """The attributes of a worker's session with parameter servers that reports use."""

    workers: Sequence[str]
    index: int
    exchange_s: Sequence[float]
    staleness: Mapping[int, int]


def facts_of(
    model: keras.Model | None, strategy: Strategy | None, params: Mapping[str, object]
) -> dict[str, object]:
    """Collect the configuration of a training, as JSON values by name."""
    model_facts = model and {
        "model": model.name,
        "class": type(model).__name__,
        "parameters": model.count_params() if model.built else "not built yet",
        **_optimizer_facts(model.optimizer),
        "loss": keras.tree.map_structure(_loss_name, model.loss),
        "precision": model.dtype_policy.name,
        "steps_per_execution": model.steps_per_execution,
    }
    facts = {
        **(model_facts or {}),
        "epochs": params.get("epochs"),
        "steps_per_epoch": params.get("steps"),
        **_strategy_facts(strategy),
        "host": socket.gethostname(),
        "script": Path(sys.argv[0]).name if sys.argv else "",
        "versions": {
            **versions(),
            **{name: metadata.version(name) for name in ("jaxlib", "numpy")},
            "Python": platform.python_version(),
        },
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def local_devices(strategy: Strategy | None) -> list[Device]:
    """The devices of this process that train."""
    if strategy is None:
        return jax.local_devices()[:1]
    mine = jax.process_index()
    return [d for d in strategy.group.mesh.devices.flat if d.process_index == mine]


def _optimizer_facts(optimizer: keras.optimizers.Optimizer | None) -> dict[str, object]:
    if optimizer is None:
        return {}
    inner = inner_of(optimizer)
    name = type(inner).__name__
    if inner is not optimizer:
        name = f"{type(optimizer).__name__} of {name}"
    rate = rate_of(optimizer)
    facts: dict[str, object] = {"optimizer": name}
    return facts if rate is None else {**facts, "learning_rate": float(rate)}


def _loss_name(loss: object) -> JSON:
    if loss is None or isinstance(loss, str):
        return loss
    return getattr(loss, "__name__", type(loss).__name__)


def _strategy_facts(strategy: Strategy | None) -> dict[str, object]:
    kinds = [(d.platform, d.device_kind) for d in local_devices(strategy)]
    devices = ", ".join(
        f"{count} x {platform}" + (f" ({kind})" if kind != platform else "")
        for (platform, kind), count in Counter(kinds).items()
    )
    if strategy is None:
        return {"strategy": "none", "devices": devices}
    group = strategy.group
    return {
        "strategy": type(strategy).__name__,
        "replicas": strategy.num_replicas_in_sync,
        "cross_device_ops": type(group.cross_device_ops).__name__,
        "compression": group.communication.compression,
        "bytes_per_pack": group.communication.bytes_per_pack or None,
        "devices": devices,
    }


class ReportedWorker:
    """This process as a worker; `servers`: its session with parameter servers."""

    def __init__(self, strategy: Strategy | None) -> None:
        self.strategy = strategy
        self.servers: ServerSession | None = getattr(strategy, "session", None)
        if self.servers is not None:
            self.names, self.index = tuple(self.servers.workers), self.servers.index
        elif strategy is not None:
            self.names = tuple(strategy.workers.names)
            self.index = strategy.workers.index
        else:
            self.names, self.index = ("worker:0",), 0
        self.name = self.names[self.index]
        self.is_chief = self.index == 0  # The chief renders the page.
        # Whether other workers train synchronously with this one.
        self.is_synchronous = self.servers is None and len(self.names) > 1

    @property
    def can_compress(self) -> bool:
        """Whether `compression` is not used yet, and would halve the bytes sent."""
        if self.strategy is None or self.servers is not None:
            return getattr(self.strategy, "compression", None) is None
        group = self.strategy.group
        # On CPUs, XLA widens bfloat16 before it sends it.
        return not (group.communication.compression or group.axis.is_of_cpus)

    def measures_of_chief(self, measures: bool) -> bool:
        """Return the chief's `measures`: synchronous workers must measure together.

        Raises:
            ClusterError: If another synchronous worker has no report.
        """
        if self.strategy is None or not self.is_synchronous:
            return measures
        what = "the start of its report: pass rx.callbacks.Report on all workers"
        exchange = self.strategy.workers.exchange
        return bool(exchange("the training report", measures, what=what)[0])

    def exchange_s(self) -> float:
        """Seconds of exchanges with the slowest server so far."""
        return 0.0 if self.servers is None else max(self.servers.exchange_s)

    def staleness(self) -> Counter[int]:
        """Histogram of the staleness of this worker's updates so far."""
        return Counter() if self.servers is None else Counter(self.servers.staleness)
