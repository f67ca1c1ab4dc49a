"""What `import replicax` does, and does not do, in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicax._private.wraps import WRAPS


def run_python(
    code: str, keras_backend: str | None = None, keras_home: Path | None = None
) -> subprocess.CompletedProcess[str]:
    # Neither is set where users begin.
    unset = "KERAS_BACKEND", "JAX_PLATFORMS"
    env = {k: v for k, v in os.environ.items() if k not in unset}
    if keras_home is not None:
        env["KERAS_HOME"] = str(keras_home)
    if keras_backend is not None:
        env["KERAS_BACKEND"] = keras_backend
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_other_libraries_may_be_imported_once_devices_are_started() -> None:
    process = run_python(
        "import replicax; replicax.set_logical_devices(2)\n"
        "import jax; jax.devices()\n"
        "replicax.MirroredStrategy(['cpu:0'])\n"
        "import jax.experimental.pallas, keras, optax, orbax.checkpoint\n"
        "print(keras.config.backend(), jax.default_backend())"
    )
    assert process.stdout == "jax cpu\n", process.stderr


LOADED = """
import sys, replicax as rx
ours = sorted(name for name in sys.modules if name.startswith("replicax"))
print(len(ours), [name for name in ("jax", "keras", "numpy") if name in sys.modules])
rx.ContextError
print([name for name in ("jax", "keras", "numpy") if name in sys.modules])
import keras, jax
known = set(sys.modules)
rx.MirroredStrategy(["cpu:0"])
packages = {name.partition(".")[0] for name in set(sys.modules) - known}
heavy = {"grain", "libcst", "orbax", "pyarrow", "rich", "tensorflow", "torch", "typer"}
print(sorted(heavy & packages))
folders = {name.split(".")[1] for name in sys.modules if name.startswith("replicax.")}
print(sorted({"commands", "estimator", "launch", "migrate", "planning", "ps", "testing"}
             & folders))
"""


def test_little_is_loaded_before_it_is_needed() -> None:
    process = run_python(LOADED)
    assert process.stdout.splitlines() == ["4 []", "[]", "[]", "[]"], process.stderr


UNCHANGED = """
import ctypes, os, signal, sys
os.environ["KERAS_BACKEND"] = "jax"
import jax, keras
from jax.interpreters import mlir

# The primitives of JAX: replicax has one of its own.
JAXS = {*mlir._lowerings, *mlir._platform_specific_lowerings["cpu"]}

def attributes():
    found = {}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] != "keras":
            continue
        for name, value in list(vars(module).items()):
            found[module.__name__, name] = id(value)
            if isinstance(value, type) and value.__module__.startswith("keras."):
                found[value, "__bases__"] = value.__bases__
                for key, attribute in list(vars(value).items()):
                    found[value, key] = id(attribute)
    return found

def state():
    return {
        "keras": attributes(),
        "environ": dict(os.environ),
        "config": dict(jax.config.values),
        "lowerings": {p: mlir._lowerings.get(p) for p in JAXS},
        "of_platforms": {k: {p: v[p] for p in v if p in JAXS}
                         for k, v in mlir._platform_specific_lowerings.items()},
        "inline": JAXS & jax._src.interpreters.mlir._uncacheable_primitives,
        "excepthook": sys.excepthook,
        "handlers": [signal.getsignal(n) for n in range(1, signal.NSIG)],
    }

def changed(before):
    after = state()
    return [name for name in before if before[name] != after[name]]

class Libc(ctypes.CDLL):
    def __init__(self, *args):
        raise SystemExit("the C library was loaded")

ctypes.CDLL, loader = Libc, ctypes.CDLL
before = state()
import replicax as rx
print(changed(before))
for name in ("MirroredStrategy", "GradientTape", "set_logical_devices"):
    getattr(rx, name)
print(changed(before))
ctypes.CDLL = loader
before = attributes()
rx.MirroredStrategy(["cpu:0"])
after = attributes()
def path(owner):
    if isinstance(owner, str):
        return owner
    return f"{owner.__module__}.{owner.__qualname__}"
new = {(path(owner), name) for owner, name in after
       if after[owner, name] != before.get((owner, name))}
from replicax._private.wraps import WRAPS
def owners_of(wrap, name):
    for owner in wrap.find_holders(name):
        yield path(owner if isinstance(owner, type) else owner.__name__)
wraps = {(owner, name) for wrap in WRAPS for name in wrap.names
         for owner in owners_of(wrap, name)}
print(sum(len(wrap.names) for wrap in WRAPS), sorted(new ^ wraps))
"""


def test_the_import_changes_nothing_and_a_strategy_installs_the_wraps() -> None:
    """Of Keras, JAX, malloc and the process; then of Keras exactly `WRAPS`."""
    process = run_python(UNCHANGED)
    number = sum(len(wrap.names) for wrap in WRAPS)
    expected = ["[]", "[]", f"{number} []"]
    assert process.stdout.splitlines() == expected, process.stderr


def test_the_import_sets_kerass_backend_and_starts_no_device() -> None:
    process = run_python(
        "import os\nbefore = dict(os.environ)\nimport replicax\n"
        "print({k: v for k, v in os.environ.items() if before.get(k) != v})\n"
        "import keras\nfrom jax._src import xla_bridge\n"
        "print(keras.config.backend(), xla_bridge.backends_are_initialized())"
    )
    expected = "{'KERAS_BACKEND': 'jax'}\njax False\n"
    assert process.stdout == expected, process.stderr


ORDERS = """
import random, sys, threading
import replicax as rx
names = list(rx.__all__)
random.Random(0).shuffle(names)
import replicax.testing, replicax.planning, replicax.checkpoint
barrier, found = threading.Barrier(4), []

def read(part):
    barrier.wait()
    found.append({name: getattr(rx, name) for name in part})

threads = [threading.Thread(target=read, args=(names[i:] + names[:i],))
           for i in (0, 20, 40, 60)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
import pkgutil, importlib
for module in pkgutil.walk_packages(rx.__path__, "replicax."):
    top = module.name.split(".")[1]
    if top not in ("migrate", "commands", "cli") and "__main__" not in module.name:
        importlib.import_module(module.name)
assert len(found) == 4
for values in found:
    for name, value in values.items():
        assert getattr(rx, name) is value, name
        assert vars(rx)[name] is value, name
print("same")
"""


def test_names_are_the_same_in_any_order_and_thread() -> None:
    process = run_python(ORDERS)
    assert process.stdout == "same\n", process.stderr


def test_another_backend_in_the_environment_is_refused() -> None:
    process = run_python("import replicax", keras_backend="torch")
    assert_refused(process, "torch")
    error = process.stderr
    assert "the environment asks Keras to run on 'torch'" in error
    assert "The environment variable KERAS_BACKEND names 'torch'" in error
    assert "export KERAS_BACKEND=jax" in error
    assert "import replicax` above" not in error  # It would not help.


@pytest.mark.slow
def test_advice_fits_a_file_of_keras(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "numpy"}')
    error = run_python("import keras, replicax", keras_home=tmp_path).stderr
    assert "Keras is running on 'numpy'" in error
    assert "Write `import replicax` above every import of keras" in error
    assert "keras.json" in error
    assert "start Python again" in error
    process = run_python(
        "import replicax, keras; print(keras.config.backend())", keras_home=tmp_path
    )
    assert process.stdout == "jax\n", process.stderr


@pytest.mark.slow
def test_a_failed_import_of_keras_can_be_mended(tmp_path: Path) -> None:
    """As in a notebook: Keras does not find TensorFlow, then replicax is imported."""
    process = run_python(
        "import sys\n"
        "sys.modules['tensorflow'] = None\n"  # As if it were not installed.
        "try:\n    import keras\n"
        "except ImportError as error:\n    print('failed')\n"
        "import replicax, keras\n"
        "print(keras.config.backend())",
        keras_home=tmp_path,
    )
    assert process.stdout == "failed\njax\n", process.stderr


@pytest.mark.slow
def test_keras_on_another_backend_is_refused() -> None:
    process = run_python("import keras, replicax", keras_backend="numpy")
    assert_refused(process, "numpy")


def assert_refused(process: subprocess.CompletedProcess[str], backend: str) -> None:
    assert process.returncode != 0, "replicax was imported"
    error = process.stderr.strip().splitlines()[-1]
    assert error.startswith(("ImportError: ", "RuntimeError: ")), process.stderr
    assert f"'{backend}'" in error
    assert "KERAS_BACKEND" in error
    assert "jax" in error


def test_the_first_tape_leaves_compiled_functions_as_they_are() -> None:
    """JAX compiles all functions again when its caches' keys get another part."""
    process = run_python(
        "import jax, replicax as rx\n"
        "strategy = rx.OneDeviceStrategy('cpu:0')\n"
        "function = jax.jit(lambda x: print('traced') or x)\n"
        "function(1.0)\n"
        "def step():\n"
        "    with rx.GradientTape() as tape:\n"
        "        return 0.0\n"
        "strategy.run(step)\n"
        "function(1.0)\n"
    )
    assert process.stdout == "traced\n", process.stderr
