"""The loop of `fit`, `evaluate` and `predict` for models of a strategy.

It does what Keras' own loop does, in the same order, through public names of models and
callbacks. Variables always have the values of the last completed step: callbacks can
read them, and so can a user after an interrupt.
"""

import dataclasses
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TypeAlias

import jax
import keras
import numpy as np

from replicax._private import trainer
from replicax._util.types import Logs, PyTree
from replicax.engine.protocols import RecorderLike, StepSource, StrategyLike
from replicax.input.distributed import DistributedInput
from replicax.keras import building, providers
from replicax.keras.adapters import adapter_of
from replicax.keras.chief import only_on_chief
from replicax.keras.epochs import Epochs
from replicax.keras.session import (
    FitSession,
    LateCallback,
    refuse_callbacks,
    session_of,
)
from replicax.keras.steps import Steps, is_of_keras, steps_of

__all__ = ["evaluate", "fit", "predict"]

CallbackList: TypeAlias = keras.callbacks.CallbackList
Callbacks: TypeAlias = (
    keras.callbacks.Callback | Sequence[keras.callbacks.Callback] | CallbackList | None
)
"""The `callbacks` argument of `fit`, `evaluate` and `predict`."""


def fit(
    model: keras.Model,
    strategy: StrategyLike,
    x: PyTree = None,
    y: PyTree = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Callbacks = None,
    validation_split: float = 0.0,
    validation_data: PyTree = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: PyTree = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
) -> PyTree:
    """`model.fit` on a strategy's replicas; arguments and result are those of Keras."""
    building.require_compiled(model, "fit")
    most = keras.config.max_epochs()
    if most and most < epochs:
        warnings.warn(f"Limiting epochs to {most}", stacklevel=2)
        epochs = most
    if validation_split and validation_data is None:
        split: PyTree = trainer.train_validation_split(
            (x, y, sample_weight), validation_split
        )
        (x, y, sample_weight), validation_data = split
    if providers.add_callbacks is not None:
        callbacks = providers.add_callbacks(callbacks)
    with FitSession(strategy, initial_epoch) as session:
        session.enter_model(model)
        session.epochs = data = Epochs(
            model,
            strategy,
            adapter_of(
                x,
                y,
                sample_weight,
                batch_size=batch_size,
                steps_per_epoch=steps_per_epoch,
                shuffle=shuffle,
                class_weight=class_weight,
                first_iteration=initial_epoch,
            ),
            steps_per_epoch,
        )
        session.callback(data.close)
        building.build(model, strategy, "train", data.first_batch)
        session.is_built = True
        data.reset()
        validation = None
        if validation_data is not None:
            names = ("x", "y", "sample_weight")
            values = keras.utils.unpack_x_y_sample_weight(validation_data)
            # A distributed dataset has batches already, and warns of a batch size.
            if not isinstance(values[0], DistributedInput):
                validation_batch_size = validation_batch_size or batch_size
            validation = _Validation(
                data=dict(zip(names, values, strict=True)),
                batch_size=validation_batch_size,
                steps=validation_steps,
                freq=validation_freq,
            )
        session.work = strategy.home.claimed_steps(model, session)
        if session.work is not None:
            session.callback(session.work.close)
        user_callbacks = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
        refuse_callbacks(user_callbacks, strategy)
        # Before `set_model`, in which TensorBoard opens its files.
        session.enter_context(only_on_chief(user_callbacks, strategy))
        # A progress bar would count only this worker's steps of an epoch.
        shares_epochs = verbose == "auto" and session.work is not None
        callback_list = _callback_list(
            model,
            callbacks,
            2 if shares_epochs else verbose,
            data,
            epochs=epochs,
            add_history=True,
        )
        loop = _FitLoop(model, session, callback_list, validation)
        try:
            loop.train(initial_epoch, epochs)
        except KeyboardInterrupt as error:
            if not error.args:
                error.args = (f"interrupted in fit{session.progress(model)}",)
            raise
    return model.history


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Validation:
    """The validation of `fit`: its data, and the epochs after which it is due."""

    data: dict[str, PyTree]
    batch_size: int | None
    steps: int | None
    freq: int | Collection[int]

    def is_due(self, epoch: int) -> bool:
        """Whether to evaluate after `epoch`, counted from 0."""
        if isinstance(self.freq, int):
            return (epoch + 1) % self.freq == 0
        if isinstance(self.freq, list | tuple | set):
            return epoch + 1 in self.freq
        raise ValueError(
            "fit: validation_freq must be a number of epochs, or a list or set of "
            f"epochs counted from 1; got {self.freq!r} of type "
            f"{type(self.freq).__name__}."
        )

    def run(
        self, model: keras.Model, session: FitSession, callbacks: CallbackList
    ) -> Logs:
        """Call the model's own `evaluate`; returns its logs with `val_` in front."""
        if session.validation is None:  # One adapter serves all epochs.
            adapter = adapter_of(
                **self.data,
                batch_size=self.batch_size,
                steps_per_epoch=self.steps,
                caller="fit, validation_data",
            )
            session.validation = Epochs(model, session.strategy, adapter, self.steps)
            session.callback(session.validation.close)
        # A model may override `evaluate`, so it gets all arguments again, as in Keras.
        evaluate: Callable[..., Logs] = model.evaluate
        logs = evaluate(
            **self.data,
            batch_size=self.batch_size,
            steps=self.steps,
            callbacks=callbacks,
            return_dict=True,
            **{trainer.IN_FIT: True},
        )
        return {f"val_{name}": value for name, value in logs.items()}


@dataclasses.dataclass
class _FitLoop:
    """The epochs of one `fit`; `logs` are those of the last step."""

    model: keras.Model
    session: FitSession
    callbacks: CallbackList
    validation: _Validation | None
    logs: PyTree = None
    late: Sequence[LateCallback] = ()

    def train(self, first: int, end: int) -> None:
        """Train the epochs from `first` to `end`, unless a callback stops training."""
        model, session, callbacks = self.model, self.session, self.callbacks
        logs: Logs = {}
        model.stop_training = False
        callbacks.on_train_begin()
        self.late = [c for c in callbacks.callbacks if isinstance(c, LateCallback)]
        for callback in self.late:
            callback.after_train_begin(callbacks.callbacks)
        begin = session.restored_epoch
        if begin is None:
            begin = trainer.initial_epoch_of(model) or first
        if session.work is not None:
            begin = session.work.begin(begin, end)
        try:
            for epoch in range(begin, end):
                logs = self._epoch(epoch)
                if model.stop_training:
                    break
        finally:
            optimizer = model.optimizer
            if isinstance(optimizer, keras.optimizers.Optimizer) and end > 0:
                optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs=logs)

    def _epoch(self, epoch: int) -> Logs:
        model, session, callbacks = self.model, self.session, self.callbacks
        model.reset_metrics()
        callbacks.on_epoch_begin(epoch)
        source: StepSource | None = session.epochs
        if session.work is not None:
            # Other workers may run the whole epoch: keep no logs of an earlier one.
            source, self.logs = session.work, None
        assert source is not None
        steps = steps_of(model, session.strategy, "train")
        for self.logs in _executions(
            model, source, steps, callbacks, "train", session.recorder
        ):
            pass
        logs = dict(_results(model, self._end_steps()))
        if self.validation is not None and self.validation.is_due(epoch):
            logs |= self.validation.run(model, session, callbacks)
        callbacks.on_epoch_end(epoch, logs)
        for callback in self.late:
            callback.after_epoch_end(epoch)
        if session.work is not None:
            session.work.after_epoch()
        return logs

    def _end_steps(self) -> PyTree:
        model, session = self.model, self.session
        if session.work is not None:
            self.logs = session.work.end_epoch(self.logs)
        if session.recorder is not None:
            session.recorder.end_steps()  # Before metrics are computed.
        if self.logs:
            return self.logs
        if session.work is not None:
            return model.get_metrics_result()  # Other workers ran all steps.
        if self.logs is None:
            raise building.no_data_error(model)
        return self.logs


def evaluate(
    model: keras.Model,
    strategy: StrategyLike,
    x: PyTree = None,
    y: PyTree = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: PyTree = None,
    steps: int | None = None,
    callbacks: Callbacks = None,
    return_dict: bool = False,
    **kwargs: PyTree,
) -> PyTree:
    """`model.evaluate` on a strategy's replicas; returns what Keras returns."""
    building.require_compiled(model, "evaluate")
    session = session_of(model)
    data = None
    if kwargs.pop(trainer.IN_FIT, False) and session is not None:
        data = session.validation
    if kwargs:
        raise ValueError(f"Arguments not recognized: {kwargs}")
    is_part_of_fit = data is not None
    with ExitStack() as stack:
        if data is None:
            adapter = adapter_of(
                x, y, sample_weight, batch_size=batch_size, steps_per_epoch=steps
            )
            data = Epochs(model, strategy, adapter, steps)
            stack.callback(data.close)
            stack.enter_context(only_on_chief(callbacks, strategy))
        building.build(model, strategy, "test", data.first_batch)
        data.reset()
        callback_list = _callback_list(model, callbacks, verbose, data)
        steps_of_model = steps_of(model, strategy, "test")
        model.stop_evaluating = False
        callback_list.on_test_begin()
        model.reset_metrics()
        last = deque(
            _executions(model, data, steps_of_model, callback_list, "test"), maxlen=1
        )
        if not last:
            what = "validation data" if is_part_of_fit else "data"
            raise building.no_data_error(model, what)
        logs = trainer.pythonify_logs(_results(model, last[0]))
        callback_list.on_test_end(logs)
    return logs if return_dict else trainer.metrics_in_order(model, logs)


def predict(
    model: keras.Model,
    strategy: StrategyLike,
    x: PyTree,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Callbacks = None,
) -> PyTree:
    """`model.predict` on a strategy's replicas; returns what Keras returns."""
    adapter = adapter_of(x, batch_size=batch_size, steps_per_epoch=steps)
    # A `predict_step` of the user's may read targets.
    only_inputs = is_of_keras(model, ["predict_step"])
    data = Epochs(model, strategy, adapter, steps, only_inputs=only_inputs)
    with closing(data), only_on_chief(callbacks, strategy):
        if not building.is_built(model):
            building.build(model, strategy, "predict", data.first_batch)
            data.reset()
        callback_list = _callback_list(model, callbacks, verbose, data)
        steps_of_model = steps_of(model, strategy, "predict")
        model.stop_predicting = False
        callback_list.on_predict_begin()
        outputs = list(
            _executions(model, data, steps_of_model, callback_list, "predict")
        )
        callback_list.on_predict_end()
    if not outputs:
        raise building.no_data_error(model)
    return jax.tree.map(lambda *xs: np.concatenate(xs), *outputs)


_FLAGS = {
    "train": "stop_training",
    "test": "stop_evaluating",
    "predict": "stop_predicting",
}


def _executions(
    model: keras.Model,
    source: StepSource,
    steps: Steps,
    callbacks: CallbackList,
    kind: str,
    recorder: RecorderLike | None = None,
) -> Iterator[PyTree]:
    begin = _batch_method(callbacks, kind, "begin")
    end = _batch_method(callbacks, kind, "end")
    flag = _FLAGS[kind]
    for first, last in source.steps():
        if begin is not None:
            begin(first)
        try:
            batches = source.next_execution()
        except StopIteration:
            source.end_early()
            return
        results = steps(batches)
        if recorder is not None:
            recorder.end_execution(results)
        yield results
        if end is not None:
            end(last, {"outputs": results} if kind == "predict" else results)
        if getattr(model, flag):
            return


def _batch_method(
    callbacks: CallbackList, kind: str, when: str
) -> Callable[..., None] | None:
    """The callbacks' method for a batch; None if no callback defines it.

    Without callbacks Keras would still pass each batch's logs to a thread, which takes
    half of the time of a tiny model's step.
    """
    names = f"on_{kind}_batch_{when}", f"on_batch_{when}"
    is_defined = trainer.defines_any(callbacks, names)
    return getattr(callbacks, names[0]) if is_defined else None


def _callback_list(
    model: keras.Model,
    callbacks: Callbacks,
    verbose: str | int,
    data: Epochs,
    *,
    epochs: int = 1,
    add_history: bool = False,
) -> CallbackList:
    if not isinstance(callbacks, CallbackList):
        callbacks = CallbackList(
            callbacks,
            add_history=add_history,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=data.num_batches,
            model=model,
        )
    return trainer.in_order(callbacks)


def _results(model: keras.Model, logs: PyTree) -> PyTree:
    """The metrics' results if the step logs just the metrics; else its logs."""
    results = model.get_metrics_result()
    same = isinstance(logs, dict) and set(logs) == set(results)
    return results if same else logs
