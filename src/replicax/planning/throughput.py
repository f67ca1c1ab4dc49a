"""The callback `Throughput`: examples per second and MFU in the logs of `fit`."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from replicax._util.types import Logs
from replicax.engine.devices import Device
from replicax.keras.session import LateCallback, session_of
from replicax.planning.cards import CARDS
from replicax.planning.rates import CHIPS, Rates
from replicax.report.recorder import Recorder
from replicax.report.runs import EpochRecord

__all__ = ["Throughput"]

_TPUS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
}
"""The chips of `rx.plan` by JAX's name of the device."""

_RATES = {
    **{card.device: card.rates for card in CARDS.values()},
    **{kind: CHIPS[name].rates for kind, name in _TPUS.items()},
}
"""Published rates by JAX's name of the device."""


class Throughput(LateCallback):
    """Adds examples per second, and optionally MFU, to each epoch's logs.

    `logs["examples_per_second"]` counts the examples of all replicas, without the
    executions that compile; NaN if all of an epoch's executions compiled. With
    parameter servers it counts those of this worker. `logs["mfu"]`, the model FLOPs
    utilization, is their FLOP/s divided by the devices' peak, from 0 to 1. `History`
    has both; list the callback before those that log. In a cluster, pass it on all
    workers.

    Args:
        flops_per_example: FLOPs of the forward and backward pass of one example, such
            as 6 times the parameters times the tokens of a text for a transformer; or
            `plan.flops * plan.num_devices / batch_size` of `rx.plan`. None: no MFU.
        peak_flops: FLOP/s of one device. None: the published figure of a TPU or NVIDIA
            GPU, of TF32 for models that compute in float32 on a GPU. For devices
            without a published figure, such as CPUs, there is then no MFU.

    Raises:
        ValueError: If a number is not positive and finite, or `peak_flops` is given
            alone.

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((32, 2))
        >>> speed = Throughput(flops_per_example=12, peak_flops=1e12)
        >>> history = model.fit(
        ...     x, x[:, :1], batch_size=8, callbacks=[speed], verbose=0
        ... )
        >>> sorted(history.history)
        ['examples_per_second', 'loss', 'mfu']
    """

    def __init__(
        self,
        flops_per_example: float | None = None,
        *,
        peak_flops: float | None = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("flops_per_example", flops_per_example),
            ("peak_flops", peak_flops),
        ):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(
                    f"Throughput: {name} must be positive and finite; got {value!r}."
                )
        if peak_flops is not None and flops_per_example is None:
            raise ValueError(
                f"Throughput: {peak_flops=!r} is for the MFU, which needs the FLOPs of "
                "an example as well. Pass flops_per_example."
            )
        self.flops_per_example = flops_per_example
        self.peak_flops = peak_flops
        self._recorder = Recorder()
        self._total_peak: float | None = None

    def after_train_begin(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Start recording, with the recorder of a `Report` if there is one."""
        model: Any = self.model
        session = session_of(model)
        assert session is not None  # `fit` calls this method.
        if isinstance(session.recorder, Recorder):
            self._recorder = session.recorder
        else:
            self._recorder = Recorder()
            session.record_with(self._recorder)
        devices = set(session.strategy.group.mesh.devices.flat)
        self._total_peak = None
        if self.flops_per_example is not None and self.peak_flops is not None:
            self._total_peak = self.peak_flops * len(devices)
        elif self.flops_per_example is not None:
            self._total_peak = _published_peak(
                devices, model.dtype_policy.compute_dtype
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Reset the counts."""
        self._recorder.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the values to the logs."""
        if logs is None:
            return
        measured = EpochRecord(
            wall_s=self._recorder.end_steps(),
            counts=dataclasses.asdict(self._recorder.tally),
        )
        rate = logs["examples_per_second"] = measured.examples_per_s
        if self.flops_per_example is not None and self._total_peak is not None:
            logs["mfu"] = rate * self.flops_per_example / self._total_peak


def _published_peak(devices: Iterable[Device], dtype: str) -> float | None:
    """The published FLOP/s of all devices; None if that of one is unknown."""
    rates = [_RATES.get(device.device_kind) for device in devices]
    known = [_peak(x, dtype) for x in rates if x is not None]
    return sum(known) if len(known) == len(rates) else None


def _peak(rates: Rates, dtype: str) -> float:
    of_type = rates.flops_by_type.get("f32") if dtype == "float32" else None
    return of_type or rates.peak_flops
