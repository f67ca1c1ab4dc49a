"""Predicts with an estimator's checkpoint, batch by batch or example by example."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence

import jax

from replicax_estimator.hooks import SessionRunHook
from replicax_estimator.model import EstimatorModel
from replicax_estimator.types import Predictions
from replicax_estimator.user_functions import InputPipeline

__all__ = ["examples_of", "predictions", "select"]


def predictions(
    model: EstimatorModel,
    source: InputPipeline,
    restore: Callable[[EstimatorModel], str],
    hooks: list[SessionRunHook],
) -> Generator[Predictions]:
    """Yield predictions batch by batch, as arrays `[b, ...]` on the host.

    Hooks of the model's spec begin in the first step, and are appended to `hooks`.
    """
    with contextlib.closing(source.steps(model.strategy)) as steps:
        for number, (features, labels) in enumerate(steps):
            if number == 0:
                model.build(features, labels)
                restore(model)
                for hook in model.spec.hooks():
                    hook.begin()
                    hooks.append(hook)
            yield model.predict(features)


def select(batch: Predictions, keys: Sequence[str] | None) -> Predictions:
    """Select predictions by key; None: all of them."""
    if keys is None:
        return batch
    names = sorted(batch) if isinstance(batch, Mapping) else []
    if not set(keys) <= set(names):
        raise ValueError(
            f"Estimator.predict: predict_keys={list(keys)!r} must be some of the "
            f"predictions' keys {names}."
        )
    return {key: batch[key] for key in keys}


def examples_of(batch: Predictions) -> Generator[Predictions]:
    """Yield a batch of predictions example by example."""
    arrays = batch.values() if isinstance(batch, Mapping) else [batch]
    sizes = {x.shape[:1] for x in arrays}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            "Estimator.predict: predictions differ in their first dimension, the "
            f"number of examples; got the shapes {[x.shape for x in arrays]}. Give "
            "yield_single_examples=False for whole batches."
        )
    for i in range(next(iter(sizes))[0]):
        yield jax.tree.map(lambda x, i=i: x[i], batch)
