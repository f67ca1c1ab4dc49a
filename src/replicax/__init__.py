"""replicax: tf.distribute's Strategy for Keras 3 on JAX.

The import selects Keras' JAX backend and does nothing else. `__init__.pyi` lists the
public names and their modules, which are loaded on first use (SPEC 1 of Scientific
Python).
"""

import os
import threading
from typing import TYPE_CHECKING

import lazy_loader

from replicax._private.backend import require_jax_backend, version_error
from replicax._version import __version__ as __version__

if TYPE_CHECKING:
    from replicax.strategies.strategy import Strategy

require_jax_backend()  # Before anything imports Keras.

_load, _, __all__ = lazy_loader.attach_stub(__name__, __file__)

# Imports in different orders by several threads would deadlock.
_loading = threading.RLock()
_is_used = False


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(_unknown(name))
    with _loading:
        _on_first_use()
        try:
            return _load(name)
        except ImportError as error:  # A private name of Keras that is gone.
            if not (error.name or "").startswith("keras."):
                raise
            raise version_error(str(error)) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _on_first_use() -> None:
    """Set the default strategy, and start the reports that the launcher asks for."""
    global _is_used
    if _is_used:
        return
    _is_used = True
    from replicax.keras import providers

    providers.default_strategy = _default_strategy
    if "REPLICAX_REPORT_DIR" in os.environ:
        from replicax._util.interrupts import describe_interrupts

        describe_interrupts()
    if page := os.environ.get("REPLICAX_REPORT"):
        from replicax.report.callback import report_every_fit

        report_every_fit(page)


def _default_strategy() -> "Strategy":
    from replicax.strategies.current import get_strategy

    return get_strategy()


def _unknown(name: str) -> str:
    text = f"module 'replicax' has no attribute {name!r}"
    if name.startswith("_"):  # Python or an editor looks it up, not a user.
        return text
    if name == "distribute":
        return f"{text}: names of tf.distribute are here, as in rx.MirroredStrategy."
    import difflib

    close = difflib.get_close_matches(name, __all__)
    return f"{text}; close to it: {', '.join(close)}." if close else text
