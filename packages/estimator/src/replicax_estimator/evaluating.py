"""Evaluates and predicts with a checkpoint, and reads earlier evaluations."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from replicax_estimator.hooks import SessionRunHook
from replicax_estimator.model import EstimatorModel
from replicax_estimator.training import Loop
from replicax_estimator.types import Predictions
from replicax_estimator.user_functions import InputPipeline, Steps

__all__ = [
    "EvalResults",
    "Evaluation",
    "append_evaluation",
    "examples_of",
    "predictions",
    "read_eval_metrics",
    "select",
]

EvalResults: TypeAlias = dict[str, Any]
"""Results of `evaluate` by metric: Python numbers or NumPy arrays."""

_METRICS_FILE = "metrics.jsonl"


class Evaluation(Loop):
    """The evaluation loop of one call of `evaluate`."""

    def run(
        self, restore: Callable[[EstimatorModel], str], num_steps: int | None
    ) -> tuple[EvalResults, str]:
        """Evaluate the checkpoint that `restore` restores; return results and path."""

        def evaluate(steps: Steps) -> tuple[EvalResults, str]:
            model = self.model
            first = self.first_step(steps, "evaluate")
            path = restore(model)
            self.global_step = int(model.global_step.numpy())
            self.start_hooks()
            for metric in (*model.metrics.values(), model.loss):
                metric.reset_state()
            all_steps = itertools.chain([first], steps)
            for features, labels in itertools.islice(all_steps, num_steps):
                self.run_step(features, labels)
                # Several workers run the same number of steps: they ignore requests.
                if self.stop_requested and model.strategy.workers.count == 1:
                    break
            self.has_ended = True
            results = _flatten(model.results())
            for hook in self.hooks:
                hook.end(self)
            return results | {"global_step": self.global_step}, path

        return self.call_with_steps(evaluate)


def _flatten(results: Mapping[str, Any]) -> EvalResults:
    """Convert scalars to Python numbers, and flatten metrics that return a dict."""
    flat: EvalResults = {}
    for name, result in results.items():
        named = result if isinstance(result, Mapping) else {name: result}
        flat |= {n: float(x) if np.ndim(x) == 0 else x for n, x in named.items()}
    return flat


def append_evaluation(folder: Path, checkpoint: str, results: EvalResults) -> None:
    """Append an evaluation, a line of JSON, to the file in this folder."""
    line = {"checkpoint": checkpoint, "time": time.time()}
    line |= {name: np.asarray(value).tolist() for name, value in results.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _METRICS_FILE).open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def read_eval_metrics(eval_dir: str | Path) -> dict[int, EvalResults]:
    """Read the metrics of the evaluations in a folder, by global step.

    `eval_dir` is the result of `estimator.eval_dir()`. Steps are in ascending order; of
    several evaluations of a step, the result contains the last one.

    Example:
        >>> import replicax as rx
        >>> batch = {"x": [1.0, 2.0]}, [2.0, 4.0]
        >>> estimator = rx.estimator.BaselineRegressor().train(lambda: batch, steps=5)
        >>> results = estimator.evaluate(lambda: batch)
        >>> list(rx.estimator.read_eval_metrics(estimator.eval_dir()))
        [5]
    """
    file = Path(eval_dir) / _METRICS_FILE
    if not file.exists():
        return {}
    results: dict[int, EvalResults] = {}
    for text in file.read_text().splitlines(keepends=True):
        if not text.endswith("\n") or not text.strip():
            continue  # Another process is writing this line.
        line = json.loads(text)
        del line["checkpoint"], line["time"]
        results[line.pop("global_step")] = line
    return dict(sorted(results.items()))


def predictions(
    model: EstimatorModel,
    source: InputPipeline,
    restore: Callable[[EstimatorModel], str],
    hooks: list[SessionRunHook],
) -> Generator[Predictions]:
    """Yield predictions batch by batch, as arrays `[b, ...]` on the host.

    In the first step the hooks of the model's spec begin and are added to `hooks`, so
    that the caller ends them.
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
