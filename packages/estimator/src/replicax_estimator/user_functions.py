"""Calls the user's `model_fn` and `input_fn` with the arguments in their signatures."""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from replicax._util.signatures import named_parameters
from replicax._util.types import PyTree
from replicax.input import InputContext
from replicax.input.prefetch import DistributedIterator, close_iterator
from replicax.input.sources import is_arrays, raw_batches
from replicax.strategies.strategy import Strategy
from replicax_estimator.run_config import RunConfig
from replicax_estimator.spec import EstimatorSpec, ModeKeys
from replicax_estimator.uneven_batches import UnevenBatches

__all__ = [
    "InputFunction",
    "InputPipeline",
    "ModelFunction",
    "Preprocess",
    "require_input_function",
    "wanted_arguments",
]

InputFunction: TypeAlias = Callable[..., object]
"""An `input_fn`: returns a dataset, or one batch."""

Preprocess: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
"""Converts a batch's features and labels to arrays of numbers, on the host."""

_MODEL_ARGUMENTS = ("labels", "mode", "params", "config")


class ModelFunction:
    """A user's `model_fn`.

    It takes `features` and any of `labels`, `mode`, `params` and `config`.
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        params: Mapping[str, object],
        config: RunConfig | None,
    ) -> None:
        if not callable(model_fn):
            raise TypeError(f"Estimator: model_fn must be callable; got {model_fn!r}.")
        self.params = dict(params)
        self._model_fn = model_fn
        self._config = config
        self._accepted = wanted_arguments(
            model_fn, "model_fn", _MODEL_ARGUMENTS, given=("features",)
        )
        parameters = named_parameters(model_fn).values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            # All of them, except those that `functools.partial` has bound.
            given = getattr(model_fn, "keywords", {})
            self._accepted = {name for name in _MODEL_ARGUMENTS if name not in given}
        if params and "params" not in self._accepted:
            raise ValueError(
                f"Estimator: got params={dict(params)!r}, but model_fn has no argument "
                "of that name."
            )

    def __call__(
        self, features: PyTree, labels: PyTree, mode: ModeKeys
    ) -> EstimatorSpec:
        """Call the function for one replica's batch, and check its spec."""
        given = {
            "labels": labels,
            "mode": mode,
            "params": dict(self.params),
            "config": self._config,
        }
        accepted = {name: given[name] for name in self._accepted}
        if "labels" not in accepted and labels is not None:
            raise ValueError(
                "Estimator: the input has labels, but model_fn has no argument of that "
                "name."
            )
        spec = self._model_fn(features, **accepted)
        if not isinstance(spec, EstimatorSpec):
            raise TypeError(
                f"Estimator: model_fn must return an EstimatorSpec; got {spec!r}."
            )
        if spec.mode != mode:
            raise ValueError(
                f"Estimator: model_fn was called with mode={str(mode)!r} and returned "
                f"an EstimatorSpec of mode {str(spec.mode)!r}."
            )
        return spec


class InputPipeline:
    """A user's `input_fn`, and the preprocessed batches of its dataset.

    It takes any of `input_context`, `mode`, `params` and `config`. It returns a dataset
    of `(features, labels)` or of features, or one such batch. A batch is for one
    replica.
    """

    def __init__(
        self,
        input_fn: InputFunction,
        mode: ModeKeys,
        preprocess: Preprocess,
        params: Mapping[str, object] | None = None,
        config: RunConfig | None = None,
        *,
        needs_labels: bool = False,
    ) -> None:
        require_input_function(input_fn, "Estimator")
        self._input_fn = input_fn
        self._mode = mode
        self._preprocess = preprocess
        self._needs_labels = needs_labels
        self._given = {"mode": mode, "params": params, "config": config}
        names = [*self._given, "input_context"]
        self._accepted = wanted_arguments(input_fn, "input_fn", names)

    def steps(self, strategy: Strategy) -> DistributedIterator:
        """Iterate over `(features, labels)`, with `PerReplica` leaves.

        The iterator's `get_state()` counts the steps.
        """
        dataset = UnevenBatches(
            self.batches,
            strategy.group.mesh,
            strategy.input_context,
            input_shard=strategy.input_shard,
            num_replicas=strategy.group.num_replicas,
        )
        return dataset.iterate()

    def batches(
        self, context: InputContext | None = None
    ) -> Generator[tuple[PyTree, PyTree]]:
        """Yield preprocessed batches `(features, labels)`, each for one replica."""
        given = self._given | {"input_context": context or InputContext()}
        result = self._input_fn(**{k: given[k] for k in self._accepted})
        iterator = self._iterator(result)
        try:
            for batch in iterator:
                yield self._preprocess(*self._parts(batch))
        finally:
            close_iterator(iterator)

    def _iterator(self, result: object) -> Iterator[PyTree]:
        if result is None:
            raise TypeError(
                "Estimator: input_fn returned None. Return a dataset of (features, "
                "labels) batches."
            )
        if isinstance(result, tuple | dict) or is_arrays(result):
            # A single batch, not a dataset. As in TF, training repeats it for ever.
            endless = self._mode == ModeKeys.TRAIN
            return itertools.repeat(result) if endless else iter([result])
        return raw_batches(result)

    def _parts(self, batch: PyTree) -> tuple[PyTree, PyTree]:
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
        return _arrays(_parts_of(features)), _arrays(_parts_of(labels))


def require_input_function(input_fn: object, caller: str) -> None:
    """Raise TypeError unless `input_fn` is callable."""
    if not callable(input_fn):
        raise TypeError(
            f"{caller}: input_fn must be a function that returns a dataset; got "
            f"{input_fn!r}. Write input_fn=lambda: dataset."
        )


def _parts_of(value: PyTree) -> PyTree:
    """Convert a list of arrays to a tuple: as in TF, it is several features."""
    is_parts = isinstance(value, list) and all(is_arrays(x) for x in value)
    return tuple(value) if is_parts else value


def _arrays(value: PyTree) -> PyTree:
    """Convert lists of numbers or strings to arrays, also in dicts and tuples."""
    if isinstance(value, dict):
        return {name: _arrays(x) for name, x in value.items()}
    if isinstance(value, tuple):
        parts = map(_arrays, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list | int | float | bool | str | bytes):
        return np.asarray(value)
    return value


def wanted_arguments(
    fn: Callable[..., object],
    name: str,
    offered: Sequence[str],
    given: Sequence[str] = (),
) -> set[str]:
    """Return those of the `offered` arguments that are in a function's signature.

    ValueError: The function requires an argument that is neither `offered` nor `given`.
    """
    parameters = named_parameters(fn).values()
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in (*given, *offered)
    ]
    if needed:
        also = f"{' and '.join(given)} and " if given else ""
        raise ValueError(
            f"Estimator: {name} has the arguments {needed}. It is called with {also}"
            f"those of {list(offered)} that it has."
        )
    return {p.name for p in parameters} & set(offered)
