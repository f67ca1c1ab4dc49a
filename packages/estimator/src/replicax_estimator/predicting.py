"""Predicts with an estimator's checkpoint, batch by batch or example by example."""

from collections.abc import Callable, Generator, Mapping, Sequence

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

    The spec's hooks begin after the model is restored, and are appended to `hooks`.
    """
    steps = source.steps(model.strategy)
    try:
        is_restored = False
        for features, labels in steps:
            if not is_restored:
                model.build(features, labels)
                restore(model)
                for hook in model.spec.hooks():
                    hook.begin()
                    hooks.append(hook)
                is_restored = True
            yield model.predict(features)
    finally:
        steps.close()


def select(batch: Predictions, keys: Sequence[str] | None) -> Predictions:
    """Select predictions by key; None: all."""
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
        if isinstance(batch, Mapping):
            yield {name: x[i] for name, x in batch.items()}
        else:
            yield batch[i]
