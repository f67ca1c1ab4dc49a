"""Writes saved models, and calls them without the Python code of the model.

    exports/
      1700000000/        Unix time in seconds, or the next free number
        manifest.json    signatures, versions and checksums
        arrays/          the variables, and each signature's program as bytes

A folder has the format of a checkpoint: readers see the whole saved model or nothing.
"""

import dataclasses
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax import export
from numpy.typing import ArrayLike

import replicax as rx
from replicax.seams import storage
from replicax_estimator.export import SINGLE, ArraySpec
from replicax_estimator.preprocessing import saved_preprocessor
from replicax_estimator.types import JSONObject

__all__ = [
    "DEFAULT_SIGNATURE",
    "Artifact",
    "SavedModel",
    "load_saved_model",
    "saved_models_in",
    "write",
]

DEFAULT_SIGNATURE = "serving_default"
_MANIFEST = "manifest.json"
_PROGRAMS, _VARIABLES = "programs/", "variables/"


@dataclasses.dataclass(frozen=True)
class Artifact:
    """The contents of a saved model."""

    contents: JSONObject  # Signatures, global step, versions.
    programs: Mapping[str, bytes]  # By signature.
    variables: Mapping[str, np.ndarray]  # By name.


def write(base: Path, artifact: Artifact) -> Path:
    """Write a saved model atomically into a new folder in `base`; return its path."""
    arrays = {_VARIABLES + n: np.asarray(x) for n, x in artifact.variables.items()}
    for name, program in artifact.programs.items():
        arrays[_PROGRAMS + name] = np.frombuffer(program, "uint8")
    path = _new_folder(base)
    values = {"saved_model": artifact.contents}
    shards = {name: storage.ShardedArray.of(x) for name, x in arrays.items()}
    storage.write(path, storage.Contents(arrays=shards, values=values))
    return path


def _new_folder(base: Path) -> Path:
    """Make a folder with the next free number: two exports never share a folder."""
    base.mkdir(parents=True, exist_ok=True)
    numbers = [int(path.name) + 1 for path in saved_models_in(base)]
    number = max([int(time.time()), *numbers])
    while True:
        path = base / f"{number:010d}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def saved_models_in(base: Path) -> list[Path]:
    """List the saved models in a folder, the oldest first."""
    if not base.is_dir():
        return []
    return sorted(
        path
        for path in base.iterdir()
        if re.fullmatch("[0-9]{10}", path.name) and (path / _MANIFEST).exists()
    )


def newest(path: Path) -> Path:
    """Return the saved model at `path`, or the newest one in that folder."""
    if (path / _MANIFEST).exists():
        return path
    paths = saved_models_in(path)
    if not paths:
        raise rx.CheckpointError(
            f"saved model {os.fspath(path)}: there is none at this path. Give the path "
            "that estimator.export_saved_model returned, or its export_dir_base."
        )
    return paths[-1]


def read(path: Path) -> Artifact:
    """Read a saved model and verify its checksums; CheckpointError names a bad file."""
    stored = storage.read(path)
    contents = stored.values["saved_model"]
    programs = {
        name: stored.arrays[_PROGRAMS + name].read().tobytes()
        for name in contents["signatures"]
    }
    variables = {
        name.removeprefix(_VARIABLES): array.read()
        for name, array in stored.arrays.items()
        if name.startswith(_VARIABLES)
    }
    return Artifact(contents=contents, programs=programs, variables=variables)


class SavedModel:
    """A saved model that `load_saved_model` returns; call it to predict.

    A call maps arrays `[b, ...]` by name to arrays by name; `inputs` and `outputs`
    return their shapes and dtypes. Variables are on JAX's default device. JAX compiles
    once for each number of rows. (TF: the result of `tf.saved_model.load`.)

    Attributes:
        path: The folder of the saved model.
        signatures: Names of its signatures.
        global_step: Number of training steps of its checkpoint.

    Example:
        >>> import replicax as rx
        >>> features, labels = {"x": [1.0, 2.0]}, [2.0, 4.0]
        >>> estimator = rx.estimator.BaselineRegressor()
        >>> estimator = estimator.train(lambda: (features, labels), steps=5)
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn(features)
        >>> path = estimator.export_saved_model(estimator.model_dir, receiver_fn)
        >>> saved = rx.estimator.load_saved_model(path)
        >>> saved.global_step, saved({"x": [0.5, 1.0]})["predictions"].shape
        (5, (2, 1))
    """

    def __init__(self, path: Path) -> None:
        artifact = read(path)
        contents = artifact.contents
        self.path = os.fspath(path)
        self.global_step: int = contents["global_step"]
        self.signatures = tuple(contents["signatures"])
        self._specs = contents["signatures"]
        self._is_single = contents["single_feature"]
        self._preprocessor = saved_preprocessor(contents["preprocessor"])
        self._programs = {
            name: jax.jit(export.deserialize(bytearray(program)).call)
            for name, program in artifact.programs.items()
        }
        self._variables = jax.device_put(dict(artifact.variables))

    def inputs(self, signature: str = DEFAULT_SIGNATURE) -> dict[str, ArraySpec]:
        """Return the inputs of a signature by name; ValueError: unknown signature."""
        return self._array_specs(signature, "inputs")

    def outputs(self, signature: str = DEFAULT_SIGNATURE) -> dict[str, ArraySpec]:
        """Return the outputs of a signature by name; ValueError: unknown signature."""
        return self._array_specs(signature, "outputs")

    def __call__(
        self,
        features: ArrayLike | Mapping[str, ArrayLike],
        signature: str = DEFAULT_SIGNATURE,
    ) -> dict[str, np.ndarray]:
        """Predict for a batch.

        Args:
            features: Arrays `[b, ...]` by the names of `inputs(signature)`, or one
                array for a model of a single unnamed feature.
            signature: Name of the signature to call.

        Returns:
            Arrays by the names of `outputs(signature)`.
        """
        specs = self.inputs(signature)
        if self._is_single and not isinstance(features, Mapping):
            features = {SINGLE: features}
        if not isinstance(features, Mapping) or set(features) != set(specs):
            needed = ", ".join(f"{name}: {spec}" for name, spec in specs.items())
            names = list(features) if isinstance(features, Mapping) else type(features)
            raise ValueError(
                f"saved model {self.path}: needs the features {needed}; got {names}."
            )
        arrays = {
            name: spec.convert(features[name], f"feature {name!r}")
            for name, spec in specs.items()
        }
        arrays, _ = self._preprocessor.prepare(arrays)
        results = self._programs[signature](self._variables, arrays)
        outputs = {name: np.asarray(x) for name, x in results.items()}
        return self._preprocessor.add_class_names(outputs)

    def _array_specs(self, signature: str, part: str) -> dict[str, ArraySpec]:
        if signature not in self.signatures:
            raise ValueError(
                f"saved model {self.path}: has no signature {signature!r}, only "
                f"{list(self.signatures)}."
            )
        entries = self._specs[signature][part].items()
        return {n: ArraySpec(tuple(shape), dtype) for n, (shape, dtype) in entries}


def load_saved_model(path: str | os.PathLike[str]) -> SavedModel:
    """Load a saved model that `Estimator.export_saved_model` has written.

    (TF: `tf.saved_model.load`.) Loading needs replicax and JAX, but neither the
    `model_fn` nor other code of the training. It verifies all checksums.

    Args:
        path: The folder that `export_saved_model` returned, or its `export_dir_base`
            for the newest saved model there.

    Raises:
        CheckpointError: If there is no saved model, it is damaged, or its format is
            newer.

    Example:
        >>> import replicax as rx
        >>> features, labels = {"x": [1.0, 2.0]}, [2.0, 4.0]
        >>> estimator = rx.estimator.BaselineRegressor()
        >>> estimator = estimator.train(lambda: (features, labels), steps=5)
        >>> receiver_fn = rx.estimator.build_raw_serving_input_receiver_fn(features)
        >>> path = estimator.export_saved_model(estimator.model_dir, receiver_fn)
        >>> rx.estimator.load_saved_model(estimator.model_dir).path == path
        True
    """
    return SavedModel(newest(Path(path)))
