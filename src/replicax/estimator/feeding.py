"""What an `input_fn` returns, as steps of a strategy."""

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

from replicax.estimator.arguments import wanted_arguments
from replicax.estimator.spec import ModeKeys
from replicax.input import InputContext
from replicax.input.from_function import UnevenBatches
from replicax.input.prefetch import close_iterator
from replicax.input.sources import is_arrays, raw_batches
from replicax.strategies.strategy import Strategy

__all__ = ["HostStep", "Input", "first_step"]

HostStep = Callable[[Any, Any], tuple[Any, Any]]
"""Makes a batch's features and labels ready on the host: arrays of numbers."""


class Input:
    """A user's `input_fn`, which makes batches for one replica each.

    Args:
        input_fn: Takes any of `input_context`, `mode`, `params` and `config`. Returns a
            dataset of `(features, labels)` or of features, or one such batch.
        mode: What the batches are for.
        host_step: Makes each batch ready.
        params: Handed to `input_fn`, if it has such an argument.
        config: Likewise.
        needs_labels: Whether batches must have labels, but for prediction.

    Raises:
        TypeError: If it is not callable.
        ValueError: If it has other arguments.
    """

    def __init__(
        self,
        input_fn: Callable[..., Any],
        mode: ModeKeys,
        host_step: HostStep,
        params: Any = None,
        config: Any = None,
        *,
        needs_labels: bool = False,
    ) -> None:
        if not callable(input_fn):
            raise TypeError(
                f"Estimator: input_fn must be a function that returns a dataset; got "
                f"{input_fn!r}. Write input_fn=lambda: dataset."
            )
        self._input_fn = input_fn
        self._mode = mode
        self._host_step = host_step
        self._needs_labels = needs_labels
        self._given = {"mode": mode, "params": params, "config": config}
        names = [*self._given, "input_context"]
        self._accepted = wanted_arguments(input_fn, "input_fn", names)

    def steps(self, strategy: Strategy, num_skipped: int = 0) -> Any:
        """An iterator over `((features, labels), num_active)`, leaves `PerReplica`.

        `get_state()` of it counts the steps.
        """
        dataset = UnevenBatches(
            self.batches,
            strategy.group.mesh,
            strategy.input_context,
            input_shard=strategy.input_shard,
            num_replicas=strategy.group.num_replicas,
        )
        return dataset.iterate(num_skipped)

    def batches(self, context: InputContext | None = None) -> Generator[Any]:
        """The batches for single replicas, ready, as `(features, labels)`."""
        given = self._given | {"input_context": context or InputContext()}
        result = self._input_fn(**{k: given[k] for k in self._accepted})
        iterator = self._iterator(result)
        try:
            for batch in iterator:
                yield self._host_step(*self._parts(batch))
        finally:
            close_iterator(iterator)

    def _iterator(self, result: Any) -> Iterator[Any]:
        if result is None:
            raise TypeError(
                "Estimator: input_fn returned None. Return a dataset of (features, "
                "labels) batches."
            )
        if isinstance(result, tuple | dict) or is_arrays(result):
            # A batch, and not a dataset: tensors, as TF has it, which never end.
            endless = self._mode == ModeKeys.TRAIN
            return itertools.repeat(result) if endless else iter([result])
        return raw_batches(result)

    def _parts(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, tuple | list):
            features, labels = batch, None
        elif len(batch) == 2:
            features, labels = batch
        else:
            raise ValueError(
                "Estimator: a batch of the input_fn must be (features, labels) or "
                f"features; got a {type(batch).__name__} of {len(batch)}."
            )
        if labels is None and self._needs_labels and self._mode != ModeKeys.PREDICT:
            raise ValueError(
                "Estimator: the input_fn gives features without labels, which mode "
                f"{str(self._mode)!r} needs. Return batches (features, labels)."
            )
        if self._mode == ModeKeys.PREDICT:
            labels = None
        return _arrays(features), _arrays(labels)


def first_step(steps: Iterator[Any], strategy: Strategy, method: str) -> Any:
    """The first of an input's steps.

    Raises:
        ValueError: If there is none.
    """
    first = next(steps, None)
    if first is None:
        raise ValueError(
            f"Estimator.{method}: the input_fn gives no batch, or too few for one step "
            f"of {strategy.num_replicas_in_sync} replicas."
        )
    return first


def _arrays(value: Any) -> Any:
    """Lists of numbers or strings as arrays, in dicts of features too."""
    if isinstance(value, dict):
        return {name: _arrays(x) for name, x in value.items()}
    if isinstance(value, tuple):
        parts = map(_arrays, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list | int | float | bool | str | bytes):
        return np.asarray(value)
    return value
