"""What is trained, with what and on what: the part of a report that does not change."""

import platform
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import keras

from replicax._version import __version__

__all__ = ["facts_of", "local_devices"]

_PACKAGES = ("jax", "jaxlib", "keras", "numpy")


def facts_of(model: Any, strategy: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run of `fit`, as JSON values by name.

    Args:
        model: The compiled Keras model.
        strategy: Its strategy; None: there is none.
        params: What Keras tells callbacks: epochs, and steps of an epoch.
    """
    facts = {
        "model": model.name,
        "class": type(model).__name__,
        "parameters": model.count_params() if model.built else "not built yet",
        **_optimizer(model.optimizer),
        "loss": _name(model.loss),
        "precision": model.dtype_policy.name,
        "epochs": params.get("epochs"),
        "steps_per_epoch": params.get("steps"),
        "steps_per_execution": model.steps_per_execution,
        **_strategy(strategy),
        "devices": _devices(strategy),
        "host": socket.gethostname(),
        "script": Path(sys.argv[0]).name if sys.argv else "",
        "versions": {
            "replicax": __version__,
            **{name: metadata.version(name) for name in _PACKAGES},
            "Python": platform.python_version(),
        },
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def local_devices(strategy: Any) -> list[Any]:
    """The devices of this process that train."""
    if strategy is None:
        return jax.local_devices()[:1]
    mine = jax.process_index()
    return [d for d in strategy.group.mesh.devices.flat if d.process_index == mine]


def _optimizer(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {}
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = inner.get_config().get("learning_rate")
    if isinstance(rate, Mapping):  # A schedule.
        rate = rate.get("class_name")
    name = type(inner).__name__
    if inner is not optimizer:
        name = f"{type(optimizer).__name__} of {name}"
    rate = float(rate) if isinstance(rate, int | float) else rate
    return {"optimizer": name, "learning_rate": rate}


def _name(loss: Any) -> Any:
    """A loss' name; of several their names."""
    if isinstance(loss, Mapping):
        return {str(k): _name(v) for k, v in loss.items()}
    if isinstance(loss, list | tuple):
        return [_name(each) for each in loss]
    if loss is None or isinstance(loss, str):
        return loss
    if isinstance(loss, keras.losses.Loss):
        return type(loss).__name__
    return getattr(loss, "__name__", type(loss).__name__)


def _strategy(strategy: Any) -> dict[str, Any]:
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


def _devices(strategy: Any) -> str:
    found = [(d.platform, d.device_kind) for d in local_devices(strategy)]
    return ", ".join(
        f"{count} x {platform}" + (f" ({kind})" if kind != platform else "")
        for (platform, kind), count in Counter(found).items()
    )
