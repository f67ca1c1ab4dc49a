"""`fit` on parameter servers: workers take the steps of an epoch from a work queue.

Every worker iterates over the data in the same order and trains on the batches that it
has claimed. Each batch goes to one worker, the next free one. The epoch ends for all
workers when all batches are claimed.
"""

import itertools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import jax
import keras
import numpy as np

from replicax._private import keras as internals
from replicax._util import json_codec, random_state
from replicax._util.hashes import digest
from replicax._util.types import JSON, PyTree
from replicax._util.waiting import announce_first
from replicax.errors import ClusterMismatchError
from replicax.keras.adapters import DistributedAdapter, fixed_number_of_batches
from replicax.keras.batches import BatchIterator, PlacedBatch, place
from replicax.keras.session import FitSession
from replicax.keras.steps import steps_of
from replicax.ps.worker_input import EpochBatches, StepLeases

if TYPE_CHECKING:
    from replicax.ps.strategy import ParameterServerStrategy

__all__ = ["WorkQueueFit"]

_logger = logging.getLogger("replicax")

_SHOWN = 500
_NEWEST = "the newest fit"


class WorkQueueFit:
    """One `fit` on this worker; `number` counts the script's calls of `fit`."""

    def __init__(
        self,
        strategy: "ParameterServerStrategy",
        model: keras.Model,
        fit: FitSession,
        number: int,
    ) -> None:
        self._strategy = strategy
        assert strategy.session is not None  # It is a worker.
        self._session = strategy.session
        self._home = strategy.servers
        self._model = model
        self._fit = fit
        assert fit.epochs is not None
        self._data = fit.epochs
        self._number = number
        self._name = f"fit {number}"
        self._epoch = 0  # Counted from the first epoch of this `fit`.
        self._end = 0  # The epoch after the last epoch.
        self._batches = EpochBatches(self._data.adapter, self._data.steps_per_epoch)
        self._stops = False  # Whether a worker stops the training in this epoch.
        self._ready: list[PlacedBatch] = []
        self._source: BatchIterator | None = None  # Of this epoch.
        # A distributed dataset yields this worker's batches only.
        self._has_own_data = isinstance(self._data.adapter, DistributedAdapter)
        self._leases = StepLeases(strategy, number, self._waiting)
        if len(self._session.workers) > 1 and not self._has_own_data:
            _refuse_stateful(model)
        self._home.fit_metrics = frozenset(map(id, model.metrics_variables))

    def begin(self, first: int, end: int) -> int:
        """Wait for the other workers; return the first epoch, which the chief decides.

        A restarted worker begins in the other workers' current epoch. If this `fit` has
        already ended, returns `end`, and the model gets the trained values.
        """
        self._end = end - self._fit.first_epoch
        self._epoch = self._agree_on_epoch(first - self._fit.first_epoch)
        for _ in range(self._epoch):
            self._batches.end(None)
        if 0 < self._epoch >= self._end:
            self._adopt_values()
        return self._fit.first_epoch + self._epoch

    def _agree_on_epoch(self, first: int) -> int:
        """The epoch in which this worker begins: the other workers' current epoch."""
        session = self._session
        newest = session.board("get", key=_NEWEST) or 0
        if newest > self._number:  # This worker is slow, or was restarted.
            _logger.warning(
                "%s: %s has already ended: other workers have begun the next fit. The "
                "model gets the trained values, and the history is empty.",
                *(session.name, self._name),
            )
            return self._end
        if session.is_chief:
            session.board("put", key=_NEWEST, value=self._number, overwrite=True)
            session.board("put", key=self._epoch_key, value=first)
        # No worker trains while another worker's script still uses the old values.
        session.barrier(f"fit begin/{self._number}")
        return session.get(self._epoch_key, f"the first epoch of {self._name}")

    @property
    def _epoch_key(self) -> str:
        return f"fit epoch/{self._number}"

    # The loop over an epoch.

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield this worker's steps of the next epoch."""
        with self._waiting():
            self._begin_epoch()
        source = announce_first(
            self._own if self._has_own_data else self._claimed,
            "waiting for the first batch",
        )
        # Batches are not prefetched: some steps are leased only after earlier steps are
        # finished. Each step is dispatched alone, because servers apply its update.
        self._source = BatchIterator(
            source,
            self._strategy.group,
            1,
            local=self._has_own_data,
            ahead=False,
            recorder=self._fit.recorder,
        )
        has_stepped = False
        while True:
            try:
                self._ready = self._source.next_execution()
            except StopIteration:
                break
            has_stepped = True
            yield self._leases.last_index, self._leases.last_index
        if not has_stepped:
            self._adopt_values()
        self._batches.finish()

    def next_execution(self) -> list[PlacedBatch]:
        """Return the batch of the current step of `steps`."""
        return self._ready

    def end_early(self) -> None:
        """Do nothing: `steps` ends with the data."""

    def _adopt_values(self) -> None:
        """Write the trained values into the model, without a step of this worker."""
        batch = self._batches.any()
        if batch is None:
            return
        steps = steps_of(self._model, self._strategy, "train")
        self._home.adopt(steps.program(place(batch, self._strategy.group)))

    def end_epoch(self, logs: PyTree) -> PyTree:
        """Wait until all updates of the epoch are applied; sum metrics, pull values.

        Returns the logs; logs that are no metrics are averaged over the workers.
        """
        self._home.settle()
        if self._model.stop_training:  # A callback has stopped the epoch.
            self._leases.stop()
        steps = steps_of(self._model, self._strategy, "train")
        other_logs = jax.tree.map(np.asarray, steps.own_logs(logs))
        with self._waiting():
            other_logs = self._combine_with_others(other_logs)
        return steps.logs_now(logs, other_logs)

    def _combine_with_others(self, logs: dict[str, PyTree]) -> dict[str, PyTree]:
        """Sum the metrics of all workers; return the means of the workers' `logs`."""
        self._leases.finish_applied()
        metrics = self._model.metrics_variables
        topic = f"{self._name}/metrics/{self._epoch}"
        values = json_codec.encode([v.value for v in metrics], "the metrics")
        stop = bool(self._model.stop_training)
        encoded = json_codec.encode(logs, "the logs")
        report = {"values": values, "stop": stop, "logs": encoded}
        self._session.as_worker("report", topic=topic, values=report)
        self._session.barrier(f"{self._name}/end of epoch/{self._epoch}")
        # Only the chief reads the reports, and publishes their sums.
        total = f"{self._name}/total/{self._epoch}"
        summed = self._session.decided(total, topic, lambda: self._summed(topic))
        totals, logs = json_codec.decode(summed)
        for variable, value in zip(metrics, totals, strict=True):
            variable.assign(value)
        self._home.refresh()
        # No worker begins the next epoch before all have the values of this epoch.
        self._session.barrier(f"{self._name}/values of epoch/{self._epoch}")
        return logs

    def _summed(self, topic: str) -> JSON:
        """On the chief, sum metrics and average logs; see whether a worker stops."""
        reports = self._session.board("reports", topic=topic).values()
        self._stops = any(report["stop"] for report in reports)
        values = [json_codec.decode(report["values"]) for report in reports]
        metrics = self._model.metrics_variables
        summed = list(map(_total, metrics, zip(*values, strict=True)))
        logs = [json_codec.decode(report["logs"]) for report in reports]
        return json_codec.encode((summed, _mean(logs)), "the metrics")

    def _waiting(self) -> AbstractContextManager[None]:
        """Context manager that reports a wait for other workers to the recorder."""
        recorder = self._fit.recorder
        return nullcontext() if recorder is None else recorder.waiting()

    def close(self) -> None:
        """End this `fit`, also after an error; record a failed `SystemExit`."""
        self._home.fit_metrics = None
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):  # Python calls no `sys.excepthook` for it.
            self._session.record_exit(error.code)

    def after_epoch(self) -> None:
        """After the callbacks: read whether the chief continues training."""
        self._epoch += 1
        self._batches.end(self._leases.length)
        is_chief = self._session.is_chief
        if is_chief:
            self._home.publish()
        self._model.stop_training = not self._session.decided(
            f"{self._name}/goes on/{self._epoch}",
            f"epoch {self._epoch} of {self._name}",
            lambda: not (self._stops or self._model.stop_training),
        )
        if is_chief:  # For workers that are being restarted.
            value = self._end if self._model.stop_training else self._epoch
            self._session.board("put", key=self._epoch_key, value=value, overwrite=True)

    # Before an epoch.

    def _begin_epoch(self) -> None:
        described = _described(self._model)
        limit = self._data.steps_per_epoch
        limit = limit or fixed_number_of_batches(self._data.adapter)
        if self._session.is_chief:  # `on_epoch_begin` may have assigned values.
            self._home.publish()
        chief = self._session.decided(
            f"{self._name}/begin/{self._epoch}",
            f"epoch {self._epoch} of {self._name}",
            lambda: {
                "random": json_codec.encode(random_state.capture(), "the random state"),
                "iteration": self._batches.iteration,
                "steps": self._home.num_steps(),
                "model": described,
                "length": limit,
            },
        )
        if described != chief["model"]:
            raise ClusterMismatchError(
                f"{self._session.name}: the model of {self._name} differs from the "
                f"chief's. Here it has {described['text']}; there "
                f"{chief['model']['text']}. All tasks must run the same script with "
                "the same arguments and versions."
            )
        if limit != chief["length"]:
            raise ClusterMismatchError(
                f"{self._session.name}: an epoch of {self._name} has "
                f"{limit or 'an unknown number of'} batches, and the chief's has "
                f"{chief['length'] or 'an unknown number'}. Pass the same data, batch "
                "size and steps_per_epoch in all tasks."
            )
        # All workers must shuffle in the same order.
        random_state.restore(json_codec.decode(chief["random"]))
        if not self._session.is_chief:
            self._home.refresh_values()  # The chief may have assigned values.
        self._home.begin_epoch(chief["steps"])
        self._stops = False
        self._batches.begin(chief["iteration"])
        stream = f"{self._name}/epoch/{self._epoch}"
        opened = self._session.board(
            "open",
            stream=stream,
            limit=limit,
            max_staleness=self._strategy.max_staleness,
        )
        self._leases.begin(stream, opened.length)

    # Batches.

    def _claimed(self) -> Iterator[PyTree]:
        """Yield the batches of this epoch that this worker has claimed."""
        while True:
            index = self._leases.claim()
            if index is None:
                return
            if self._batches.has_passed(index):
                # A restarted server may lease a finished step again, but this worker
                # has already read past its batch.
                self._leases.finish_last()
                continue
            batch = self._batches.at(index)
            if batch is None:
                self._leases.truncate(index)
                continue
            self._leases.last_index = index
            yield batch

    def _own(self) -> Iterator[PyTree]:
        """Yield batches of this worker's own data while the epoch has steps."""
        for step in itertools.count():
            if self._leases.claim() is None:
                return
            batch = self._batches.next()
            if batch is None:  # No other worker has batches for these steps.
                self._leases.finish_unused()
                return
            self._leases.last_index = step
            yield batch


def _total(metric: keras.Variable, values: Sequence[np.ndarray]) -> np.ndarray:
    total = np.sum(values, axis=0, dtype=values[0].dtype)
    if metric.aggregation != "sum":
        total = total / len(values)
    return total.astype(metric.dtype)


def _mean(logs: Sequence[dict[str, PyTree]]) -> dict[str, PyTree]:
    """The mean of each log, over the workers that have it."""
    by_name: dict[str, list[PyTree]] = {}
    for worker_logs in logs:
        for name, value in worker_logs.items():
            by_name.setdefault(name, []).append(value)
    return {
        name: jax.tree.map(lambda *x: np.mean(x, axis=0), *values)
        for name, values in by_name.items()
    }


def _refuse_stateful(model: keras.Model) -> None:
    """Raise for RNNs that carry their state from batch to batch."""
    for layer in internals.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise NotImplementedError(
                f"fit: layer {layer.name!r} of model {model.name!r} has stateful=True: "
                "it begins each batch with the state after the previous batch. With "
                "ParameterServerStrategy another worker may have trained on that "
                "batch. Use one worker, create data for each worker with strategy."
                "distribute_datasets_from_function, or pass the state from step to "
                "step, with return_state=True and initial_state."
            )


def _described(model: keras.Model) -> dict[str, str]:
    """Describe a model's variables, to compare them between workers."""
    variables = [internals.described(v) for v in model.variables]
    text = json.dumps(variables)
    summary = digest(text)
    if len(text) > _SHOWN:
        text = f"{text[:_SHOWN]}... ({len(variables)} variables)"
    return {"digest": summary, "text": text}
