"""Calls the user's `model_fn` and `input_fn` with the arguments in their signatures."""

import functools
import inspect
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

import replicax as rx
from replicax.seams import raw_batches
from replicax_estimator.arguments import require_callable, require_instance
from replicax_estimator.run_config import RunConfig
from replicax_estimator.spec import EstimatorSpec, ModeKeys
from replicax_estimator.types import Features, InputFunction, Labels, Preprocess

__all__ = ["InputPipeline", "ModelFunction", "Step", "Steps", "accepted_arguments"]

Step: TypeAlias = tuple[Features, Labels]
"""Features and labels of a step, whose leaves are `PerReplica`."""


class Steps(Iterator[Step], Protocol):
    """An iterator over steps, with a method to stop it."""

    def close(self) -> None:
        """Stop the iteration."""


class ModelFunction:
    """Calls a user's `model_fn`, and checks its result."""

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        params: Mapping[str, object],
        config: RunConfig | None,
    ) -> None:
        require_callable(model_fn, "Estimator: model_fn")
        self.params = dict(params)
        self._model_fn = model_fn
        self._config = config
        available = ("labels", "mode", "params", "config")
        self._accepted = accepted_arguments(
            model_fn, "model_fn", available, required=("features",)
        )
        if params and "params" not in self._accepted:
            raise ValueError(
                f"Estimator: got params={dict(params)!r}, but model_fn has no argument "
                "`params`. Add it, or remove the params."
            )

    def __call__(
        self, features: Features, labels: Labels, mode: ModeKeys
    ) -> EstimatorSpec:
        """Call the function for one replica's batch, and check its spec."""
        arguments = {"labels": labels, "mode": mode, "config": self._config}
        arguments["params"] = dict(self.params)
        if "labels" not in self._accepted and labels is not None:
            raise ValueError(
                "Estimator: the input has labels, but model_fn has no argument "
                "`labels`. Add it, or return only features from the input_fn."
            )
        spec = self._model_fn(
            features, **{name: arguments[name] for name in self._accepted}
        )
        what = "Estimator: the result of model_fn"
        require_instance(spec, EstimatorSpec, what)
        if spec.mode != mode:
            raise ValueError(f"{what} has mode {spec.mode!r} instead of {mode!r}.")
        return spec


class InputPipeline:
    """Reads and preprocesses the batches of a user's `input_fn`."""

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
        remedy = "Write input_fn=lambda: dataset."
        require_callable(input_fn, "Estimator: input_fn", remedy)
        self._input_fn = input_fn
        self._mode = mode
        self._preprocess = preprocess
        self._needs_labels = needs_labels
        self._arguments = {"mode": mode, "params": params, "config": config}
        names = [*self._arguments, "input_context"]
        self._accepted = accepted_arguments(input_fn, "input_fn", names)

    def steps(self, strategy: rx.Strategy) -> Steps:
        """Iterate over the steps, which a thread prefetches.

        A single process drops no batch. Several workers drop the last batches if these
        are too few for all replicas of all workers.
        """
        if strategy.workers.count > 1:
            return iter(strategy.distribute_datasets_from_function(self.batches))
        context, size = strategy.input_context, strategy.num_replicas_in_sync
        batches = functools.partial(self.batches, context)
        return rx.input.prefetch(lambda: _group(rx.input.batches(batches), size))

    def batches(self, context: rx.InputContext) -> Generator[tuple[Features, Labels]]:
        """Yield preprocessed batches `(features, labels)`, each for one replica."""
        arguments = self._arguments | {"input_context": context}
        result = self._input_fn(**{name: arguments[name] for name in self._accepted})
        batches: Iterator[Any]
        if isinstance(result, tuple | dict) or _is_array(result):
            # A single batch: as in TF, training repeats it without end.
            is_endless = self._mode == ModeKeys.TRAIN
            batches = itertools.repeat(result) if is_endless else iter([result])
        else:
            batches = raw_batches(result)
        try:
            for batch in batches:
                yield self._preprocess(*self._split(batch))
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def _split(self, batch: Any) -> tuple[Features, Labels]:
        """Split a batch into features and labels, both of arrays."""
        is_pair = isinstance(batch, tuple | list)
        features, labels = batch if is_pair else (batch, None)
        if labels is None and self._needs_labels and self._mode != ModeKeys.PREDICT:
            raise ValueError(
                f"Estimator: mode {str(self._mode)!r} needs labels, and the input_fn "
                "returns only features. Return batches (features, labels)."
            )
        if self._mode == ModeKeys.PREDICT:
            labels = None
        return _arrays(_as_tuple(features)), _arrays(_as_tuple(labels))


def _group(
    batches: Iterable[tuple[Features, Labels]], num_replicas: int
) -> Generator[Step]:
    """Yield steps of `num_replicas` batches of equal shapes.

    The last step before a change of shapes or the end may lack batches: the replicas
    without a batch compute on a copy of the last one, and their results are ignored.
    """
    rows = (rx.input.split_global_batch(batch, 1).batch for batch in batches)
    if num_replicas > 1:  # Copy: a dataset may reuse the arrays of a batch.
        rows = (jax.tree.map(np.array, batch) for batch in rows)
    for _, group in itertools.groupby(rows, _shapes):
        while step := list(itertools.islice(group, num_replicas)):
            num_active = len(step) if len(step) < num_replicas else None
            step += step[-1:] * (num_replicas - len(step))
            yield jax.tree.map(
                lambda *parts, n=num_active: rx.PerReplica(np.concatenate(parts), n),
                *step,
            )


def _shapes(batch: tuple[Features, Labels]) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "__array__")


def _as_tuple(value: Any) -> Any:
    """Convert a list of arrays to a tuple: as in TF, it is not stacked to one array."""
    has_arrays = isinstance(value, list) and all(_is_array(x) for x in value)
    return tuple(value) if has_arrays else value


def _arrays(value: Any) -> Any:
    """Convert numbers, strings and lists of these to arrays, also in dicts, tuples."""
    if isinstance(value, dict):
        return {name: _arrays(x) for name, x in value.items()}
    if isinstance(value, tuple):
        parts = map(_arrays, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list | int | float | bool | str | bytes):
        return np.asarray(value)
    return value


def accepted_arguments(
    fn: Callable[..., object],
    name: str,
    available: Sequence[str],
    required: Sequence[str] = (),
) -> set[str]:
    """Select the `available` arguments that a function has in its signature.

    A function with `**kwargs` accepts all, except those that `functools.partial` has
    bound. ValueError: The function requires another argument.
    """
    parameters = inspect.signature(fn).parameters.values()
    unknown = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in (*required, *available)
    ]
    if unknown:
        raise ValueError(
            f"Estimator: {name} requires the arguments {unknown}. The estimator passes "
            f"only {[*required, *available]}: bind the others with functools.partial."
        )
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = set(available) if accepts_all else {p.name for p in parameters}
    return (names & set(available)) - set(getattr(fn, "keywords", {}))
