"""Exporters: decide when `train_and_evaluate` exports, and which exports are kept."""

import abc
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

from replicax.seams import storage
from replicax_estimator.arguments import require_callable, require_count
from replicax_estimator.artifact import saved_models_in
from replicax_estimator.estimator import Estimator
from replicax_estimator.evaluating import EvalResults, read_eval_metrics
from replicax_estimator.receivers import ServingInputReceiver, require_receiver_fn

__all__ = ["BestExporter", "Exporter", "FinalExporter", "LatestExporter"]

_logger = logging.getLogger("replicax")


class Exporter(abc.ABC):
    """Base class of exporters, which `train_and_evaluate` calls after evaluations.

    A subclass must define `name`, and `export`, whose arguments come by keyword. (TF:
    `tf.estimator.Exporter`.)

    Example:
        >>> import shutil, replicax as rx
        >>> class CheckpointExporter(rx.estimator.Exporter):
        ...     name = "checkpoint"
        ...     def export(self, export_path, checkpoint_path, **others):
        ...         shutil.rmtree(export_path, ignore_errors=True)
        ...         return shutil.copytree(checkpoint_path, export_path)
        >>> CheckpointExporter().name
        'checkpoint'
    """

    name: str
    """The folder's name: exports are in `<model_dir>/export/<name>`."""

    @abc.abstractmethod
    def export(
        self,
        estimator: Estimator,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | None,
        eval_result: EvalResults | None,
        is_the_final_export: bool,
    ) -> str | None:
        """Export the model, if this exporter's condition holds.

        Args:
            estimator: The estimator.
            export_path: This exporter's own folder.
            checkpoint_path: The checkpoint that was evaluated.
            eval_result: The result of `evaluate`.
            is_the_final_export: Whether training has ended.

        Returns:
            The new export's folder, or None.
        """


class _SavedModelExporter(Exporter):
    """Calls `export_saved_model`, and deletes all but the newest exports."""

    _only_final = False

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], ServingInputReceiver] | None,
        exports_to_keep: int | None = 5,
    ) -> None:
        caller = type(self).__name__
        self._receiver_fn = require_receiver_fn(serving_input_receiver_fn, caller)
        if exports_to_keep is not None:
            require_count(exports_to_keep, f"{caller}: exports_to_keep")
        self.name = name
        self._num_kept = exports_to_keep

    def export(
        self,
        estimator: Estimator,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | None,
        eval_result: EvalResults | None,
        is_the_final_export: bool,
    ) -> str | None:
        """See the base class."""
        if self._only_final and not is_the_final_export:
            return None
        path = estimator.export_saved_model(
            export_path, self._receiver_fn, checkpoint_path
        )
        if self._num_kept is not None:
            for old in saved_models_in(Path(export_path))[: -self._num_kept]:
                storage.remove(old)
        return path


class FinalExporter(_SavedModelExporter):
    """Exports once, when training has ended.

    Arguments are those of `LatestExporter`.

    Example:
        >>> import numpy as np, replicax as rx
        >>> features = {"x": np.ones((1, 3), "float32")}
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn(features)
        >>> rx.estimator.FinalExporter("final", receiver_fn).name
        'final'
    """

    _only_final = True

    def __init__(
        self, name: str, serving_input_receiver_fn: Callable[[], ServingInputReceiver]
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, exports_to_keep=None)


class LatestExporter(_SavedModelExporter):
    """Exports after each evaluation.

    Args:
        name: Name of the folder with the exports.
        serving_input_receiver_fn: As for `Estimator.export_saved_model`.
        exports_to_keep: Number of newest exports to keep; None: all.

    Example:
        >>> import numpy as np, replicax as rx
        >>> features = {"x": np.ones((1, 3), "float32")}
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn(features)
        >>> rx.estimator.LatestExporter("latest", receiver_fn, exports_to_keep=2).name
        'latest'
    """


class BestExporter(_SavedModelExporter):
    """Exports when an evaluation is better than all earlier ones.

    Evaluations of earlier processes, in `estimator.eval_dir(eval_name)`, count too: a
    restart does not export a worse model. Other arguments are `LatestExporter`'s.

    Args:
        name: Name of the folder with the exports.
        compare_fn: Called with `best_eval_result` and `current_eval_result`, both dicts
            of metrics; returns whether the current one is better. None: whether its
            `"loss"` is smaller.
        eval_name: The name of the evaluations, as in `EvalSpec(name=...)`.

    Example:
        >>> import numpy as np, replicax as rx
        >>> features = {"x": np.ones((1, 3), "float32")}
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn(features)
        >>> def is_more_accurate(best_eval_result, current_eval_result):
        ...     return current_eval_result["accuracy"] > best_eval_result["accuracy"]
        >>> exporter = rx.estimator.BestExporter(
        ...     serving_input_receiver_fn=receiver_fn, compare_fn=is_more_accurate
        ... )
        >>> exporter.name
        'best_exporter'
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], ServingInputReceiver] | None = None,
        compare_fn: Callable[..., bool] | None = None,
        exports_to_keep: int | None = 5,
        *,
        eval_name: str | None = None,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, exports_to_keep)
        if compare_fn is not None:
            require_callable(compare_fn, "BestExporter: compare_fn")
        self._is_better = compare_fn or _has_smaller_loss
        self._eval_name = eval_name
        self._best: EvalResults | None = None
        self._model_dir: str | None = None

    def export(
        self,
        estimator: Estimator,
        export_path: str | os.PathLike[str],
        checkpoint_path: str | None,
        eval_result: EvalResults | None,
        is_the_final_export: bool,
    ) -> str | None:
        """See the base class."""
        eval_result = eval_result or {}
        if self._model_dir != estimator.model_dir:
            self._model_dir = estimator.model_dir
            self._best = self._best_before(estimator, eval_result)
        if self._best is not None and not self._beats(eval_result, self._best):
            return None
        path = super().export(
            estimator, export_path, checkpoint_path, eval_result, is_the_final_export
        )
        self._best = dict(eval_result)
        return path

    def _best_before(
        self, estimator: Estimator, eval_result: EvalResults
    ) -> EvalResults | None:
        """Read the best evaluation of earlier processes; leave out the current one."""
        best: EvalResults | None = None
        folder = estimator.eval_dir(self._eval_name)
        for step, metrics in read_eval_metrics(folder).items():
            result = metrics | {"global_step": step}
            if step != eval_result.get("global_step") and (
                best is None or self._beats(result, best)
            ):
                best = result
        if best is not None:
            _logger.info("BestExporter: the best evaluation so far is %s.", best)
        return best

    def _beats(self, result: EvalResults, best: EvalResults) -> bool:
        return bool(self._is_better(best_eval_result=best, current_eval_result=result))


def _has_smaller_loss(
    best_eval_result: EvalResults, current_eval_result: EvalResults
) -> bool:
    best, current = best_eval_result["loss"], current_eval_result["loss"]
    return current < best or (math.isnan(best) and not math.isnan(current))
