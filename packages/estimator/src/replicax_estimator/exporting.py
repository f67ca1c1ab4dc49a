"""Exports a model as serving signatures: serialized programs without Python code."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import jax
import keras
import numpy as np
from jax import export

import replicax as rx
from replicax_estimator.export import SINGLE, ArraySpec, ServingInputReceiver
from replicax_estimator.model import EstimatorModel
from replicax_estimator.preprocessing import (
    Preprocessor,
    preprocessor_config,
    saved_preprocessor,
)
from replicax_estimator.serving import DEFAULT_SIGNATURE, Artifact, write
from replicax_estimator.spec import EstimatorSpec
from replicax_estimator.types import Arrays, Features, JSONObject

__all__ = ["export_model"]

_Specs: TypeAlias = dict[str, ArraySpec]

_PLATFORMS = ("cpu", "cuda", "tpu")
_NUM_ROWS = 2
"""Rows of the batch that builds the model: more than 1, as a single row broadcasts."""

_logger = logging.getLogger("replicax")


def export_model(
    model: EstimatorModel,
    restore: Callable[[EstimatorModel], str],
    receiver: ServingInputReceiver,
    base: Path,
    preprocessor: Preprocessor | None,
    platforms: Sequence[str] | None,
) -> Path:
    """Export a checkpoint as a saved model in a new folder in `base`; return its path.

    `model` has PREDICT mode and is not yet built. `preprocessor` is the canned
    estimator's; None for a user's `model_fn`, whose features need no preprocessing.
    """
    platforms = list(platforms or _PLATFORMS)
    is_single = not isinstance(receiver.features, Mapping)
    num_rows = receiver.default_batch_size
    if preprocessor is None:
        preprocessor = Preprocessor((), in_program=tuple(receiver.specs()))
    config = preprocessor_config(preprocessor)
    preprocessor = saved_preprocessor(config)  # As `load_saved_model` makes it.
    inputs, arrays = _inputs(receiver, preprocessor)
    model.build(arrays[SINGLE] if is_single else arrays, None)
    checkpoint = restore(model)
    global_step = int(model.global_step.numpy())
    values = {name: np.asarray(v.value) for name, v in model.variables().items()}
    (b,) = export.symbolic_shape("b")
    rows = b if num_rows is None else num_rows
    program_inputs = {
        name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for name, x in arrays.items()
    }

    def outputs_of(
        values: Mapping[str, jax.Array], features: Features
    ) -> dict[str, Arrays]:
        features = features[SINGLE] if is_single else features
        return _signatures(model.spec_of(values, features))

    programs: dict[str, bytes] = {}
    signatures: JSONObject = {}
    names = jax.eval_shape(outputs_of, values, arrays)
    for name in sorted(names, key=lambda name: (name != DEFAULT_SIGNATURE, name)):
        program = jax.jit(lambda v, x, name=name: outputs_of(v, x)[name])
        try:
            exported = export.export(program, platforms=platforms)(
                values, program_inputs
            )
        except Exception as error:  # Tracing and XLA raise errors of many types.
            raise ValueError(
                f"export_saved_model: signature {name!r} cannot be exported for "
                f"{platforms}: {error} If a platform lacks an operation, give "
                "platforms=... without that platform. If the model_fn needs the number "
                "of rows, give build_raw_serving_input_receiver_fn("
                "..., default_batch_size=...)."
            ) from error
        outputs = _outputs(exported, num_rows, preprocessor)
        programs[name] = bytes(exported.serialize())
        signatures[name] = {
            "inputs": {n: [spec.shape, spec.dtype] for n, spec in inputs.items()},
            "outputs": {n: [spec.shape, spec.dtype] for n, spec in outputs.items()},
        }
    contents = {
        "versions": {
            "jax": jax.__version__,
            "keras": keras.__version__,
            "replicax": rx.__version__,
        },
        "global_step": global_step,
        "platforms": platforms,
        "signatures": signatures,
        "single_feature": is_single,
        "preprocessor": config,
    }
    path = write(base, Artifact(contents, programs, values))
    _logger.info("Exported step %d of %s to %s.", global_step, checkpoint, path)
    return path


def _inputs(
    receiver: ServingInputReceiver, preprocessor: Preprocessor
) -> tuple[_Specs, dict[str, np.ndarray]]:
    """Return the specs of the raw features, and a batch of zeros for the program."""
    specs = {
        name: spec.canonical() if name in preprocessor.in_program else spec
        for name, spec in receiver.specs().items()
    }
    rows = receiver.default_batch_size or _NUM_ROWS
    raw = {name: spec.zeros(rows) for name, spec in specs.items()}
    return specs, preprocessor.prepare(raw)[0]


def _signatures(spec: EstimatorSpec) -> dict[str, Arrays]:
    """Collect the outputs of each signature by name."""
    signatures: dict[str, Arrays] = {}
    all_outputs = {DEFAULT_SIGNATURE: spec.predictions, **(spec.export_outputs or {})}
    for signature, outputs in all_outputs.items():
        named = dict(outputs) if isinstance(outputs, Mapping) else {"output": outputs}
        for name, value in named.items():
            if not hasattr(value, "shape"):
                raise TypeError(
                    f"EstimatorSpec: outputs of signature {signature!r} must be an "
                    f"array, or a dict of arrays by name; output {name!r} is {value!r}."
                )
        signatures[signature] = named
    return signatures


def _outputs(
    exported: export.Exported, num_rows: int | None, preprocessor: Preprocessor
) -> _Specs:
    """Return the specs of a program's outputs, and of the classes' names, by name."""
    avals = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    specs = {
        name: ArraySpec(
            tuple(n if isinstance(n, int) else None for n in aval.shape),
            np.dtype(aval.dtype).name,
        )
        for name, aval in avals.items()
    }
    zeros = {name: spec.zeros(num_rows or _NUM_ROWS) for name, spec in specs.items()}
    for name, array in preprocessor.add_class_names(zeros).items():
        if name not in specs:  # Class names.
            specs[name] = ArraySpec((num_rows, *array.shape[1:]), "string")
    return specs
