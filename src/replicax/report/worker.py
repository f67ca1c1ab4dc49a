"""The worker that a reported `fit` runs in, and its configuration."""

import logging
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
from replicax.errors import ClusterError
from replicax.strategies.strategy import Strategy

__all__ = ["ReportedWorker", "facts_of", "local_devices"]

_logger = logging.getLogger("replicax")

_PACKAGES = ("jaxlib", "numpy")
_MEET_S = 10.0


class ServerSession(Protocol):
    """A worker's session with parameter servers, as far as reports need it."""

    workers: Sequence[str]
    index: int
    exchange_s: Sequence[float]
    staleness: Mapping[int, int]


def facts_of(
    model: keras.Model, strategy: Strategy | None, params: Mapping[str, object]
) -> dict[str, object]:
    """Collect the configuration of a run of `fit`, as JSON values by name."""
    facts = {
        "model": model.name,
        "class": type(model).__name__,
        "parameters": model.count_params() if model.built else "not built yet",
        **_optimizer(model.optimizer),
        "loss": keras.tree.map_structure(_name, model.loss),
        "precision": model.dtype_policy.name,
        "epochs": params.get("epochs"),
        "steps_per_epoch": params.get("steps"),
        "steps_per_execution": model.steps_per_execution,
        **_strategy(strategy),
        "devices": _devices(strategy),
        "host": socket.gethostname(),
        "script": Path(sys.argv[0]).name if sys.argv else "",
        "versions": {
            **versions(),
            **{name: metadata.version(name) for name in _PACKAGES},
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


def _optimizer(optimizer: keras.optimizers.Optimizer | None) -> dict[str, object]:
    if optimizer is None:
        return {}
    inner = inner_of(optimizer)
    try:
        rate = inner.get_config().get("learning_rate")
    except NotImplementedError:  # A schedule of the user's without `get_config`.
        rate = None
    if isinstance(rate, Mapping):  # A schedule of Keras.
        rate = rate.get("class_name")
    name = type(inner).__name__
    if inner is not optimizer:
        name = f"{type(optimizer).__name__} of {name}"
    return {"optimizer": name, "learning_rate": rate}


def _name(loss: object) -> JSON:
    if loss is None or isinstance(loss, str):
        return loss
    return getattr(loss, "__name__", type(loss).__name__)  # Of a function or an object.


def _strategy(strategy: Strategy | None) -> dict[str, object]:
    if strategy is None:
        return {"strategy": "none"}
    group = strategy.group
    return {
        "strategy": type(strategy).__name__,
        "replicas": strategy.num_replicas_in_sync,
        "cross_device_ops": type(group.cross_device_ops).__name__,
        "compression": group.communication.compression,
        "bytes_per_pack": group.communication.bytes_per_pack or None,
    }


def _devices(strategy: Strategy | None) -> str:
    kinds = [(d.platform, d.device_kind) for d in local_devices(strategy)]
    return ", ".join(
        f"{count} x {platform}" + (f" ({kind})" if kind != platform else "")
        for (platform, kind), count in Counter(kinds).items()
    )


class ReportedWorker:
    """This process as a worker, and its exchanges with the others for the report."""

    def __init__(self, strategy: Strategy | None) -> None:
        self.strategy = strategy
        # Only a strategy of parameter servers has a session.
        self.served: ServerSession | None = getattr(strategy, "session", None)
        if self.served is not None:
            self.names, self.index = tuple(self.served.workers), self.served.index
        elif strategy is not None:
            self.names = tuple(strategy.workers.names)
            self.index = strategy.workers.index
        else:
            self.names, self.index = ("worker:0",), 0

    @property
    def name(self) -> str:
        """This worker's name."""
        return self.names[self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this worker renders the page."""
        return self.index == 0

    @property
    def is_in_step(self) -> bool:
        """Whether other workers train synchronously with this one."""
        return self.served is None and len(self.names) > 1

    @property
    def straggler(self) -> str:
        """The straggler that the first worker has found, in words; empty: none."""
        if self.strategy is None or not self.is_in_step:
            return ""
        watch = self.strategy.workers.watch
        return "" if watch is None else watch.stragglers.found

    @property
    def compression(self) -> str | None:
        """The compression of gradients; None: none."""
        if self.strategy is None:
            return None
        if self.served is None:
            return self.strategy.group.communication.compression
        return getattr(self.strategy, "compression", None)

    def wants(self, diagnosis_wanted: bool) -> bool:
        """Agree whether to measure after training: the chief decides for all.

        It waits for the others, which begin `fit` at the same time.
        """
        if not self.is_in_step:
            return diagnosis_wanted
        answers = self._exchange(diagnosis_wanted)
        # A late worker finds all answers, but others may have timed out before.
        agreed = self._exchange(answers is not None)
        return answers is not None and bool(answers[0]) and all(agreed or [False])

    def _exchange(self, value: bool) -> list[object] | None:
        assert self.strategy is not None
        try:
            return self.strategy.workers.exchange(
                "the training report", value, timeout_seconds=_MEET_S, in_order=False
            )
        except ClusterError as error:
            _logger.warning(
                "Report: communication will not be measured, as all workers would have "
                "to take part. Pass the callback on all of them. (%s)",
                error,
            )
            return None

    def exchange_s(self) -> float:
        """Seconds of exchanges with the slowest server so far."""
        return 0.0 if self.served is None else max(self.served.exchange_s)

    def staleness(self) -> Counter[int]:
        """Histogram of the staleness of this worker's updates so far."""
        return Counter() if self.served is None else Counter(self.served.staleness)
