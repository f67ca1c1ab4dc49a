"""Evaluates an estimator's checkpoint, and reads earlier evaluations."""

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from replicax._util.types import PyTree
from replicax.checkpoint.evaluation import METRICS_FILE
from replicax.input.prefetch import DistributedIterator
from replicax_estimator.model import EstimatorModel
from replicax_estimator.training import Loop

__all__ = ["EvalResults", "Evaluation", "read_eval_metrics"]

EvalResults: TypeAlias = dict[str, PyTree]
"""Results of `evaluate` by metric: Python numbers or NumPy arrays."""


class Evaluation(Loop):
    """The evaluation loop of one call of `evaluate`."""

    def run(
        self, restore: Callable[[EstimatorModel], str], num_steps: int | None
    ) -> tuple[EvalResults, str]:
        """Evaluate the checkpoint that `restore` restores; return results and path."""

        def evaluate(steps: DistributedIterator) -> tuple[EvalResults, str]:
            model = self.model
            first = self.first_step(steps, "evaluate")
            path = restore(model)
            self.global_step = int(model.global_step.numpy())
            self.start_hooks()
            for metric in (*model.metrics.values(), model.loss):
                metric.reset_state()
            every = itertools.islice(itertools.chain([first], steps), num_steps)
            for features, labels in every:
                self.run_step(features, labels)
                if self.stops and model.strategy.workers.count == 1:
                    break
            self.is_over = True
            results = _flat(model.results())
            for hook in self.hooks:
                hook.end(self)
            return results | {"global_step": self.global_step}, path

        return self.over_steps(evaluate)


def _flat(results: Mapping[str, PyTree]) -> EvalResults:
    """Convert scalars to Python numbers, and flatten metrics that return a dict."""
    flat: EvalResults = {}
    for name, result in results.items():
        named = result if isinstance(result, Mapping) else {name: result}
        flat |= {n: float(x) if np.ndim(x) == 0 else x for n, x in named.items()}
    return flat


def read_eval_metrics(eval_dir: str | Path) -> dict[int, EvalResults]:
    """Read the evaluations in a folder, by global step in ascending order.

    The last evaluation of a step replaces earlier ones.

    Args:
        eval_dir: The folder, from `estimator.eval_dir()`.

    Returns:
        The metrics by name for each global step; empty without evaluations.

    Example:
        >>> import numpy as np, replicax as rx
        >>> def input_fn():
        ...     x = np.linspace(-1, 1, 32, dtype="float32")
        ...     return {"x": x}, 2 * x
        >>> columns = [rx.feature_column.numeric_column("x")]
        >>> estimator = rx.estimator.LinearRegressor(columns).train(input_fn, steps=5)
        >>> results = estimator.evaluate(input_fn, steps=1)
        >>> metrics = rx.estimator.read_eval_metrics(estimator.eval_dir())
        >>> list(metrics), metrics[5]["loss"] == results["loss"]
        ([5], True)
    """
    file = Path(eval_dir) / METRICS_FILE
    if not file.exists():
        return {}
    found: dict[int, EvalResults] = {}
    for text in file.read_text().splitlines(keepends=True):
        if not text.endswith("\n") or not text.strip():
            continue  # Another process is writing this line.
        line = json.loads(text)
        del line["checkpoint"], line["time"]
        found[line.pop("global_step")] = line
    return dict(sorted(found.items()))
