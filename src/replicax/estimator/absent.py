"""Names and arguments of tf.estimator that are not here, with what to use instead."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

__all__ = ["getter_of_absent", "refuses"]

_Called = TypeVar("_Called", bound=Callable[..., Any])

_MODEL_FN = "write its model as a model_fn for rx.estimator.Estimator"
_HEAD = (
    "there are no heads: compute loss and metrics in a model_fn for "
    "rx.estimator.Estimator"
)
_SERIALIZED = "there is no tf.Example: read records in the input_fn, into arrays"
_HOOK = "write a rx.estimator.SessionRunHook"
_DICT = "give the array, or the dict of arrays by name, itself"
_FIXED = (
    "sequences are not columns: make arrays [B, time] and give them to Keras layers"
)

_NAMES: dict[str, dict[str, str]] = {
    "rx.estimator": {
        "BaselineEstimator": _MODEL_FN,
        "BinaryClassHead": _HEAD,
        "BoostedTreesClassifier": "use a library of trees",
        "BoostedTreesRegressor": "use a library of trees",
        "CheckpointSaverHook": "give RunConfig(save_checkpoints_steps=...)",
        "DNNEstimator": _MODEL_FN,
        "DNNLinearCombinedEstimator": _MODEL_FN,
        "FeedFnHook": "there is nothing to feed: return the data from the input_fn",
        "FinalOpsHook": f"{_HOOK}, whose end() computes it",
        "GlobalStepWaiterHook": "synchronous workers start together",
        "Head": _HEAD,
        "LinearEstimator": _MODEL_FN,
        "LogisticRegressionHead": _HEAD,
        "MultiClassHead": _HEAD,
        "MultiHead": _HEAD,
        "MultiLabelHead": _HEAD,
        "PoissonRegressionHead": _HEAD,
        "ProfilerHook": f"{_HOOK} that calls jax.profiler.start_trace and stop_trace",
        "RegressionHead": _HEAD,
        "SecondOrStepTimer": f"{_HOOK} that compares run_context.session.global_step",
        "SummarySaverHook": f"{_HOOK} that fetches values by name and writes them",
        "WarmStartSettings": "give the checkpoint's path itself as warm_start_from",
        "VocabInfo": "load the embedding's rows in the model_fn",
        "add_metrics": "return the metrics in eval_metric_ops of a model_fn",
        "classifier_parse_example_spec": _SERIALIZED,
        "regressor_parse_example_spec": _SERIALIZED,
        "tpu": "give RunConfig(train_distribute=rx.TPUStrategy()) to any estimator",
    },
    "rx.estimator.experimental": {
        "InMemoryEvaluatorHook": "use rx.estimator.train_and_evaluate",
        "KMeans": "use a library of clustering",
        "LinearSDCA": "give LinearClassifier(optimizer='Ftrl')",
        "RNNClassifier": _MODEL_FN,
        "RNNEstimator": _MODEL_FN,
        "make_stop_at_checkpoint_step_hook": "give StopAtStepHook(last_step=...)",
    },
    "rx.estimator.export": {
        "ClassificationOutput": _DICT,
        "EvalOutput": _DICT,
        "ExportOutput": _DICT,
        "PredictOutput": _DICT,
        "RegressionOutput": _DICT,
        "TensorServingInputReceiver": "give ServingInputReceiver a single array",
        "build_parsing_serving_input_receiver_fn": (
            "there is no tf.Example: give arrays to build_raw_serving_input_receiver_fn"
        ),
    },
    "rx.feature_column": {
        "make_parse_example_spec": _SERIALIZED,
        "sequence_categorical_column_with_hash_bucket": _FIXED,
        "sequence_categorical_column_with_identity": _FIXED,
        "sequence_categorical_column_with_vocabulary_file": _FIXED,
        "sequence_categorical_column_with_vocabulary_list": _FIXED,
        "sequence_input_layer": _FIXED,
        "sequence_numeric_column": _FIXED,
        "shared_embedding_columns": "use shared_embeddings",
    },
}


def getter_of_absent(module: str) -> Callable[[str], NoReturn]:
    """Make the `__getattr__` of a module, such as `"rx.estimator"`."""
    names = _NAMES[module]

    def get(name: str) -> NoReturn:
        hint = f"; {names[name]}" if name in names else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}.")

    return get


def refuses(caller: str, **instead: str) -> Callable[[_Called], _Called]:
    """Decorate a function or class: arguments of TF raise an error that says more.

    It does not change the signature. `instead` says for each argument what to use. A
    value that asks for nothing, such as None or False, is accepted.

    Raises:
        TypeError: In a call: if such an argument is given.
    """

    def decorate(called: _Called) -> _Called:
        is_class = inspect.isclass(called)
        # A class stays itself: it gets another `__init__`.
        fn = vars(called)["__init__"] if is_class else called

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in instead.keys() & kwargs.keys():
                if value := kwargs.pop(name):
                    raise TypeError(
                        f"{caller}: there is no argument {name!r}, got {value!r}. "
                        f"{instead[name]}"
                    )
            return fn(*args, **kwargs)

        if not is_class:
            return cast(_Called, checked)
        setattr(called, "__init__", checked)  # noqa: B010 - no attribute of `_Called`.
        return cast(_Called, called)

    return decorate
