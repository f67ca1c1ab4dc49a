"""Optimizers as canned estimators take them."""

import copy
from collections.abc import Callable
from typing import Any

import keras

__all__ = ["optimizer_maker"]


def optimizer_maker(
    optimizer: Any, learning_rate: float, name: str = "optimizer"
) -> Callable[[], Any]:
    """A function that makes the optimizer anew, as a `model_fn` must.

    Args:
        optimizer: The name of a Keras optimizer, in any case; a Keras optimizer, of
            which copies are made with its settings as they are now; or a function that
            returns one, which is called in the `model_fn`.
        learning_rate: For names.
        name: The argument's, for errors.

    Raises:
        TypeError: If it is something else. The function raises it, too, if the user's
            returns something else.
        ValueError: If there is no optimizer of this name, or one whose settings do not
            make it again.
    """
    if isinstance(optimizer, str):
        _named(optimizer, learning_rate, name)
        return lambda: _named(optimizer, learning_rate, name)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return _copies_of(optimizer, name)
    if callable(optimizer):
        return lambda: _required(optimizer(), f"{name}: the function's result")
    raise TypeError(
        f"{name}: must be the name of a Keras optimizer, such as 'Adam', a Keras "
        f"optimizer or a function that returns one; got {optimizer!r}."
    )


def _named(identifier: str, learning_rate: float, name: str) -> Any:
    config = {"learning_rate": learning_rate}
    cause = None
    try:
        # For other names than optimizers' it returns something else, or raises.
        made = keras.optimizers.deserialize(
            {"class_name": identifier, "config": config}
        )
    except (TypeError, ValueError) as error:
        made, cause = None, error
    if not isinstance(made, keras.optimizers.Optimizer):
        raise ValueError(
            f"{name}: there is no Keras optimizer {identifier!r} that a learning rate "
            "is enough for. Give another name, such as 'SGD', 'Adagrad', 'Adam', "
            "'RMSProp' or 'Ftrl', or a Keras optimizer."
        ) from cause
    return made


def _copies_of(optimizer: Any, name: str) -> Callable[[], Any]:
    # Read now: in the model_fn its learning rate would be a variable from outside.
    config = _unnamed(copy.deepcopy(optimizer.get_config()))
    made: Callable[[Any], Any] = type(optimizer).from_config

    def make() -> Any:
        try:
            return made(copy.deepcopy(config))  # Keras changes it.
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name}: {type(optimizer).__name__}.from_config(get_config()) does "
                "not make the optimizer again. Give a function that returns it: "
                f"{name}=lambda: ..."
            ) from error

    make()
    return make


def _unnamed(config: dict[str, Any]) -> dict[str, Any]:
    """Without names, which count what a process has made, and get into checkpoints."""
    config.pop("name", None)
    inner = config.get("inner_optimizer")
    if isinstance(inner, dict) and isinstance(inner.get("config"), dict):
        _unnamed(inner["config"])
    return config


def _required(optimizer: Any, what: str) -> Any:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{what} must be a Keras optimizer; got {optimizer!r}.")
    return optimizer
