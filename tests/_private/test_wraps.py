"""The wraps on other versions of Keras: errors name functions that do not fit."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import pytest

import replicax as rx
from replicax._private import wraps
from replicax._private.backend import is_tested_version, version_error
from replicax._private.wraps import WRAPS, Wrap
from replicax.keras import hooks


def add_loss(original: Any, layer: Any, loss: Any) -> None: ...


def add_losses(original: Any, layer: Any, losses: Any) -> None: ...


def add_loss_and_weight(original: Any, layer: Any, loss: Any, weight: Any) -> None: ...


def add_weighted_loss(original: Any, layer: Any, loss: Any, *, weight: Any) -> None: ...


def add_nothing(original: Any, layer: Any) -> None: ...


def add_anything(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None: ...


def difference(hook: Callable[..., Any], **changes: Any) -> str | None:
    given = {"path": "keras.Layer", "names": ("add_loss",), "reason": ""} | changes
    return wraps._difference(Wrap(**given), given["names"][0], hook)


@pytest.mark.parametrize("hook", [add_loss, add_anything])
def test_a_hook_with_equal_parameters_fits(hook: Any) -> None:
    assert difference(hook) is None


@pytest.mark.parametrize(
    "hook", [add_losses, add_loss_and_weight, add_weighted_loss, add_nothing]
)
def test_other_parameters_are_named(hook: Any) -> None:
    text = difference(hook)
    assert text is not None
    assert "keras.Layer.add_loss has other parameters, (self, loss)" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"names": ("add_losses",)}, "keras.Layer has no 'add_losses'"),
        ({"path": "keras.Layers"}, "no attribute 'Layers'"),
        ({"path": "keras.src.nowhere"}, "No module named 'keras.src.nowhere'"),
        (
            {"path": "keras.Model", "base_with": "train"},
            "no base of keras.Model has a method 'train'",
        ),
    ],
)
def test_missing_functions_are_named(changes: dict[str, Any], text: str) -> None:
    found = difference(add_loss, **changes)
    assert found is not None
    assert text in found


def test_the_owner_of_a_method_that_a_user_replaced() -> None:
    """Libraries that log trainings replace `keras.Model.fit`."""
    rx.OneDeviceStrategy("cpu:0")
    wrap = next(wrap for wrap in WRAPS if "fit" in wrap.names)
    owner = wrap.find_owner()
    assert owner is not keras.Model
    own = keras.Model.fit
    try:
        keras.Model.fit = own
        assert wrap.find_owner() is owner
    finally:
        del keras.Model.fit


def test_no_module_of_keras_keeps_a_replaced_function() -> None:
    """Not even under another name."""
    rx.OneDeviceStrategy("cpu:0")
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("keras.")]
    for wrap in WRAPS:
        if "src" not in wrap.path:
            continue
        for name in wrap.names:
            function: Any = vars(wrap.find_owner())[name]
            original = function.__wrapped__
            holders = [
                f"{m.__name__}.{key}"
                for m in modules
                for key, value in list(vars(m).items())
                if value is original
            ]
            assert holders == []


def test_the_error_names_the_version_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keras, "__version__", "3.17.0")
    text = str(version_error("keras.Layer has no 'add_loss'"))
    assert "Keras 3.17.0: keras.Layer has no 'add_loss'. The last version" in text
    assert text.endswith("Install it: pip install keras==3.15.1")
    assert is_tested_version("3.15.0")
    assert not is_tested_version("3.16.0")
    assert not is_tested_version("3.1.4")


NEWER = """
import keras, logging
import replicax as rx
logging.basicConfig(level="WARNING")
keras.__version__ = "3.17.0"
changed = {changed!r}
if changed:
    def add_loss(self, losses):
        pass
    add_loss.__module__ = keras.Layer.__module__
    keras.Layer.add_loss = add_loss
fit = keras.Model.fit
for _ in range(2):
    try:
        rx.OneDeviceStrategy("cpu:0")
    except ImportError as error:
        print(error)
print(keras.Model.fit is fit)
"""


@pytest.mark.parametrize("changed", [False, True])
def test_a_newer_keras(changed: bool) -> None:
    """If its functions fit, one warning; otherwise nothing is replaced."""
    process = subprocess.run(
        [sys.executable, "-c", NEWER.format(changed=changed)],
        env=dict(os.environ) | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    *said, is_untouched = process.stdout.splitlines()
    assert is_untouched == str(changed), process.stderr
    assert process.stderr.count("Keras 3.17.0 was not tested") == (not changed)
    if changed:
        assert len(said) == 2
        for line in said:
            assert "Keras 3.17.0: keras.Layer.add_loss has other parameters" in line
            assert "pip install keras==3.15.1" in line
    else:
        assert said == []


def test_hooks_have_the_signature_of_their_function() -> None:
    signature = wraps.inspect.signature(hooks._HOOKS["Model.predict"])
    names = ["model", "x", "batch_size", "verbose", "steps", "callbacks"]
    assert list(signature.parameters) == names


WITHOUT_A_NAME = """
import keras
from keras.src.utils import naming
del naming.to_snake_case
keras.__version__ = "3.17.0"
import replicax as rx
try:
    rx.MirroredStrategy
except ImportError as error:
    print(error)
"""


def test_a_missing_private_name() -> None:
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_NAME],
        env=dict(os.environ) | {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Keras 3.17.0: cannot import name 'to_snake_case'" in process.stdout
    assert "pip install keras==3.15.1" in process.stdout, process.stderr
