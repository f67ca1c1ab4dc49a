"""Python runs this first in processes that tests start: they start and compile sooner.

`conftest.py` puts the folder into their PYTHONPATH.
"""

import os
import sys

# What Keras imports wherever it finds it takes half of the time of `import keras`, and
# no test needs it of Keras.
_NOT_FOR_KERAS = ("matplotlib", "pandas", "requests", "sklearn")


class _Hidden:
    """Keras finds none of `_NOT_FOR_KERAS`; everything else does."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name not in _NOT_FOR_KERAS:
            return
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].startswith("importlib."):
            frame = frame.f_back
        if frame.f_globals["__name__"].startswith("keras."):
            raise ModuleNotFoundError(f"{name} is hidden from Keras", name=name)


sys.meta_path.insert(0, _Hidden)

# In the environment of the tests themselves these flags would end the TPU compiler.
_more = os.environ.get("REPLICAX_TESTS_XLA_FLAGS")
if _more and "optimization_level=0" in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] += f" {_more}"
