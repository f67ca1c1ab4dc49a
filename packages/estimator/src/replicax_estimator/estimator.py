"""`Estimator`: trains, evaluates and predicts with the model of a `model_fn`."""

import logging
import os
import random
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import replicax as rx
from replicax.seams import require_path, synchronize_random_state
from replicax_estimator.arguments import require_count, require_instance
from replicax_estimator.evaluating import (
    EvalResults,
    Evaluation,
    append_evaluation,
    examples_of,
    predictions,
    select,
)
from replicax_estimator.export import ServingInputReceiver, require_receiver_fn
from replicax_estimator.exporting import export_model
from replicax_estimator.hooks import CheckpointSaverListener, SessionRunHook
from replicax_estimator.model import EstimatorModel
from replicax_estimator.run_config import RunConfig, one_device
from replicax_estimator.saving import (
    CHECKPOINT_NAME,
    restore_for_evaluation,
    saved_variables,
    warm_start,
)
from replicax_estimator.spec import EstimatorSpec, ModeKeys
from replicax_estimator.training import Training
from replicax_estimator.types import (
    Features,
    InputFunction,
    Labels,
    Predictions,
    Preprocess,
)
from replicax_estimator.user_functions import InputPipeline, ModelFunction

__all__ = ["Estimator"]

_logger = logging.getLogger("replicax")


class Estimator:
    """Trains, evaluates and predicts with the model that a `model_fn` describes.

    The state is in `model_dir`: each call restores the newest checkpoint there, and
    training saves a checkpoint. So calls may be in different processes, under different
    strategies.

    Args:
        model_fn: Called with `features`, and with `labels`, `mode`, `params` and
            `config` if its signature has them; returns an `EstimatorSpec`. It processes
            one replica's batch and makes layers, optimizer and metrics. It is called
            more than once, and each call must make the same layers, in the same order.
        model_dir: Folder of the checkpoints, unless the config has a `model_dir`.
        config: Strategies, intervals and the seed.
        params: Passed to `model_fn` and `input_fn`.
        warm_start_from: A checkpoint, or a folder of checkpoints, that initializes the
            variables of a new training.
        preprocess: Called on the host with each batch's features and labels (None for
            prediction); returns both as arrays of numbers. It converts strings to
            numbers, as `rx.feature_column.features_of` does.

    Attributes:
        is_temporary: Whether `model_dir` is a new temporary folder.

    Example:
        >>> import keras, numpy as np, replicax as rx
        >>> def model_fn(features, labels, mode):
        ...     prediction = keras.layers.Dense(1)(features)[:, 0]
        ...     if mode == rx.estimator.ModeKeys.PREDICT:
        ...         return rx.estimator.EstimatorSpec(mode, predictions=prediction)
        ...     loss = keras.losses.MeanSquaredError()(labels, prediction)
        ...     optimizer = keras.optimizers.SGD(0.1)
        ...     return rx.estimator.EstimatorSpec(mode, loss=loss, optimizer=optimizer)
        >>> batch = np.ones((4, 1), "float32"), np.ones(4, "float32")
        >>> estimator = rx.estimator.Estimator(model_fn)
        >>> estimator = estimator.train(lambda: batch, steps=100)
        >>> estimator.evaluate(lambda: batch)["loss"] < 1e-3
        True
    """

    _needs_labels = False
    _has_trained_weights = False  # Whether the model_fn assigns trained weights.

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | os.PathLike[str] | None = None,
        *,
        preprocess: Preprocess | None = None,
    ) -> None:
        config = RunConfig() if config is None else config
        require_instance(config, RunConfig, "Estimator: config")
        folders = {os.fspath(x) for x in (model_dir, config.model_dir) if x is not None}
        for folder in folders:
            require_path(folder, "Estimator: model_dir")
        if "" in folders:
            raise ValueError("Estimator: model_dir must name a folder; got ''.")
        if len(folders) > 1:
            raise ValueError(
                f"Estimator: model_dir={model_dir!r} and the config's "
                f"{config.model_dir!r} differ. Give one of them."
            )
        self.is_temporary = not folders
        prefix = "replicax-estimator-"
        folder = folders.pop() if folders else tempfile.mkdtemp("", prefix)
        if self.is_temporary:
            _logger.warning("Estimator: model_dir is the temporary folder %s.", folder)
        self._config = config.replace(model_dir=folder)
        self._function = ModelFunction(model_fn, params or {}, self._config)
        self._preprocess = preprocess
        self._warm_start_from = warm_start_from
        self._models: dict[tuple[ModeKeys, rx.Strategy], EstimatorModel] = {}

    @property
    def model_dir(self) -> str:
        """Folder of the checkpoints."""
        return os.fspath(self._config.model_dir or "")

    @property
    def config(self) -> RunConfig:
        """The configuration, with the `model_dir`."""
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the params."""
        return dict(self._function.params)

    def train(
        self,
        input_fn: InputFunction,
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> "Estimator":
        """Continue from the newest checkpoint, save a new one, and return `self`.

        Args:
            input_fn: Returns a dataset of `(features, labels)` batches, each for **one
                replica**: a step reads one batch for each replica. Its arguments may be
                `input_context`, `mode`, `params` and `config`. Each worker calls it
                once. A single batch in place of a dataset is repeated without end.
            hooks: `SessionRunHook`s.
            steps: Number of steps of this call.
            max_steps: The global step to end at. Without `steps` and `max_steps`,
                training ends with the input.
            saving_listeners: `CheckpointSaverListener`s.

        Raises:
            CheckpointError: If the checkpoint is of another model.
            NanLossDuringTrainingError: If the loss becomes NaN or infinite.
        """
        for number in (steps, max_steps):
            require_count(number, "Estimator.train: the number of steps", or_none=True)
        if steps is not None and max_steps is not None:
            raise ValueError(
                f"Estimator.train: got steps={steps!r} and max_steps={max_steps!r}. "
                "Give either steps, the number of steps of this call, or max_steps, "
                "the global step to end at."
            )

        def last_step(first: int) -> int | None:
            return max_steps if steps is None else first + steps

        strategy = self._config.training_strategy()
        key = ModeKeys.TRAIN, strategy
        has_servers = isinstance(strategy, rx.ParameterServerStrategy)
        has_one_process = strategy.workers.count == 1 and not has_servers
        if has_one_process and self.latest_checkpoint() is None:
            self._models.pop(key, None)  # Its checkpoints were deleted: train anew.
        model = self._model(ModeKeys.TRAIN, strategy)
        training = Training(
            model=model,
            source=self._input(input_fn, ModeKeys.TRAIN),
            hooks=list(hooks or ()),
            directory=self.model_dir,
            config=self._config,
            listeners=saving_listeners or (),
            last_step=last_step,
            initialize=self._initialize,
        )
        try:
            training.run()
        except BaseException:
            # The model in memory differs from the last checkpoint.
            self._models.pop(key, None)
            raise
        return self

    def _initialize(self, model: EstimatorModel) -> None:
        """Initialize a new training's variables from `warm_start_from`, if given."""
        if self._warm_start_from is not None:
            warm_start(model, os.fspath(self._warm_start_from))

    def evaluate(
        self,
        input_fn: InputFunction,
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> EvalResults:
        """Evaluate a checkpoint.

        Args:
            input_fn: As for `train`. A single batch is evaluated once.
            steps: Number of steps; None: until the input ends. A single process also
                evaluates an incomplete last step.
            hooks: `SessionRunHook`s.
            checkpoint_path: The checkpoint; None: the newest.
            name: Name of the evaluations; use another name for each data set.

        Returns:
            Results of the spec's `eval_metric_ops` by name, `loss` (the mean of the
            batches' losses) and `global_step`.

        Raises:
            CheckpointError: If the checkpoint is of another model.
        """
        require_count(steps, "Estimator.evaluate: the number of steps", or_none=True)
        strategy = self._config.evaluating_strategy()
        key = ModeKeys.EVAL, strategy
        restore = self._restorer(checkpoint_path, "evaluate", key)
        model = self._model(*key)
        source = self._input(input_fn, ModeKeys.EVAL)
        loop = Evaluation(model=model, source=source, hooks=list(hooks or ()))
        results, path = loop.run(restore, steps)
        if strategy.is_chief:
            append_evaluation(Path(self.eval_dir(name)), path, results)
        _logger.info("Evaluation of %s: %s", path, results)
        return results

    def predict(
        self,
        input_fn: InputFunction,
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Generator[Predictions]:
        """Predict on one device.

        Args:
            input_fn: Returns features, or `(features, labels)`, whose labels are
                ignored.
            predict_keys: Keys of the predictions to yield; None: all.
            hooks: Hooks; only their `begin` and `end` are called.
            checkpoint_path: The checkpoint; None: the newest.
            yield_single_examples: Whether to yield example by example; if False, batch
                by batch.

        Yields:
            NumPy arrays, or dicts of arrays, for one example or for one batch.
        """
        key = ModeKeys.PREDICT, one_device()
        restore = self._restorer(checkpoint_path, "predict", key)
        model = self._model(*key)
        source = self._input(input_fn, ModeKeys.PREDICT)
        all_hooks = list(hooks or ())
        for hook in all_hooks:
            hook.begin()
        # A second generator at the same time must make its own model.
        self._models.pop(key, None)
        try:
            for batch in predictions(model, source, restore, all_hooks):
                selected = select(self._postprocess(batch), predict_keys)
                if yield_single_examples:
                    yield from examples_of(selected)
                else:
                    yield selected
        finally:
            self._models[key] = model
        for hook in all_hooks:
            hook.end(None)

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], ServingInputReceiver],
        checkpoint_path: str | None = None,
        *,
        platforms: Sequence[str] | None = None,
    ) -> str:
        """Export a checkpoint as a saved model; return the saved model's folder.

        `load_saved_model` loads it without the `model_fn`. Each signature is a program
        that `jax.export` serializes: `"serving_default"` computes the predictions, and
        each of the spec's `export_outputs` is a further signature. A single prediction
        is named `"output"`, a single feature `"feature"`. A canned estimator exports
        its columns and class names, too. A `preprocess` function is not exported.

        Args:
            export_dir_base: Parent of the saved model's folder, whose name is the Unix
                time and whose `manifest.json` lists signatures, versions and checksums.
            serving_input_receiver_fn: Returns the features' names and shapes; see
                `build_raw_serving_input_receiver_fn`.
            checkpoint_path: The checkpoint; None: the newest.
            platforms: Platforms to export for, out of `"cpu"`, `"cuda"`, `"rocm"` and
                `"tpu"`. None: all but `"rocm"`.

        Raises:
            CheckpointError: If the checkpoint is of another model.
        """
        caller = "export_saved_model"
        key = ModeKeys.PREDICT, one_device()
        restore = self._restorer(checkpoint_path, caller, key)
        if self._preprocess is not None:
            _logger.warning(
                "%s: the preprocess function is Python code and is not exported. The "
                "saved model needs the arrays that preprocess returns.",
                caller,
            )
        # A generator of predictions may still use the model in `self._models`.
        seed = self._config.tf_random_seed or 0
        model = EstimatorModel(self._function, *key, seed)
        receiver = require_instance(
            require_receiver_fn(serving_input_receiver_fn, caller)(),
            ServingInputReceiver,
            f"{caller}: the result of serving_input_receiver_fn",
        )
        preprocessor = getattr(self, "preprocessor", None)
        base = Path(export_dir_base)
        path = export_model(model, restore, receiver, base, preprocessor, platforms)
        return os.fspath(path)

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint in `model_dir`; None without one."""
        return rx.latest_checkpoint(self.model_dir, CHECKPOINT_NAME)

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables in the newest checkpoint."""
        return sorted(saved_variables(self._checkpoint(None, "get_variable_names")))

    def get_variable_value(self, name: str) -> np.ndarray:
        """Return a variable's value in the newest checkpoint, or raise KeyError."""
        return saved_variables(self._checkpoint(None, "get_variable_value"))[name]

    def eval_dir(self, name: str | None = None) -> str:
        """Return the folder of the evaluations, which are lines of `metrics.jsonl`."""
        return os.path.join(self.model_dir, "eval" if not name else f"eval_{name}")

    def _prepare(self, features: Features, labels: Labels) -> tuple[Features, Labels]:
        """Convert a batch to arrays of numbers, on the host."""
        if self._preprocess is not None:
            features, labels = self._preprocess(features, labels)
        return features, labels

    def _postprocess(self, predictions: Predictions) -> Predictions:
        """Add strings, which programs cannot return, to predictions."""
        return predictions

    def _input(self, input_fn: InputFunction, mode: ModeKeys) -> InputPipeline:
        return InputPipeline(
            input_fn,
            mode,
            self._prepare,
            self.params,
            self._config,
            needs_labels=self._needs_labels,
        )

    def _model(self, mode: ModeKeys, strategy: rx.Strategy) -> EstimatorModel:
        key = mode, strategy
        if key not in self._models:
            strategy.home.begin()
            # The model's seed and the order of input functions depend on this state.
            synchronize_random_state(strategy.workers)
            seed = self._config.tf_random_seed
            if seed is None:
                seed = random.randrange(2**31)
            self._models[key] = EstimatorModel(self._function, mode, strategy, seed)
        return self._models[key]

    def _restorer(
        self, path: str | None, method: str, key: tuple[ModeKeys, rx.Strategy]
    ) -> Callable[[EstimatorModel], str]:
        """Return a function that restores a checkpoint and returns its path.

        If there is no checkpoint, a model with trained initial values keeps them, and
        the path is "". For a model without such values, this method raises ValueError.
        """
        has_values = self._has_trained_weights or self._warm_start_from is not None

        def find_path() -> str | None:
            if has_values and path is None:
                return self.latest_checkpoint()
            return self._checkpoint(path, method)

        if find_path() is None:
            self._models.pop(key, None)  # It may have values of a deleted checkpoint.
        return lambda model: restore_for_evaluation(model, find_path, self._initialize)

    def _checkpoint(self, path: str | None, method: str) -> str:
        checkpoint = path or self.latest_checkpoint()
        if checkpoint is None:
            raise ValueError(
                f"Estimator.{method}: there is no checkpoint in {self.model_dir}. "
                "Call train first, or give the model_dir of a trained model."
            )
        return os.fspath(checkpoint)
