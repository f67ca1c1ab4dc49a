"""Types of arguments and results of users' functions."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

__all__ = [
    "Arrays",
    "Features",
    "InputFunction",
    "JSONObject",
    "Labels",
    "Predictions",
    "Preprocess",
    "Tensor",
]

JSONObject: TypeAlias = dict[str, Any]

Arrays: TypeAlias = dict[str, jax.Array]
"""Traced arrays by name."""

Tensor: TypeAlias = Any
"""An array, a number or a symbolic Keras tensor. Any: Keras annotates no types."""

Features: TypeAlias = Any
"""A batch's features: an array `[b, ...]`, or a dict or tuple of such arrays."""

Labels: TypeAlias = Any
"""A batch's labels, in one of the forms of `Features`; None in PREDICT mode."""

Predictions: TypeAlias = Any
"""A model's predictions: an array, or a dict of arrays by name."""

InputFunction: TypeAlias = Callable[..., object]
"""An `input_fn`: returns a dataset, or one batch."""

Preprocess: TypeAlias = Callable[[Features, Labels], tuple[Features, Labels]]
"""Converts a batch's features and labels to arrays of numbers, on the host."""
