"""Eight logical CPU devices for the whole run, and checks that tests clean up."""

import gc
import os
import signal
import subprocess
import tempfile
from pathlib import Path

# Tests compare with numbers of CPUs, also where there are GPUs; `make test-gpu` says
# otherwise. And where the TPU compiler is installed, which is a package of the tests,
# JAX would look for chips in every process, which takes a lock and prints warnings.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Tests compile much and compute little: XLA makes code quickly rather than fast code,
# and in one piece, which costs less than pieces for several threads.
# Processes that tests start inherit it; for TPUs the program is the same, and for GPUs
# nothing is set. XLA_FLAGS of the environment stay, even empty ones: with them `make
# test-all` compiles the slow tests as it is done for users.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
    )

# Processes that tests start import this replicax, and run `startup/sitecustomize.py`.
_TESTS = Path(__file__).parent
_SATELLITES = ("packages/estimator/src", "packages/migrate/src")
_PATHS = [
    str(_TESTS / "startup"),
    *(str(_TESTS.parent / folder) for folder in ("src", *_SATELLITES)),
]
if os.environ.get("PYTHONPATH", "").split(os.pathsep)[: len(_PATHS)] != _PATHS:
    _more = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, *_more])
collect_ignore = ["startup"]
# They find its modules compiled, also where Python is told to keep nothing compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests send these to processes that they start, which would inherit it if whoever runs
# the tests ignores them, as `nohup` and scripts in the background do.
for _signal, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)

# Folders that nobody names, such as those of estimators, end with the run;
# those of `tmp_path` stay where pytest keeps the last ones.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
_folders = tempfile.TemporaryDirectory(
    prefix="replicax-tests-", ignore_cleanup_errors=True
)
os.environ["TMPDIR"] = tempfile.tempdir = _folders.name

# No test depends on what earlier ones left in a user's folder.
os.environ["REPLICAX_COMPILATION_CACHE"] = "off"

import jax  # noqa: E402
from jax._src.lru_cache import LRUCache  # noqa: E402

import replicax as rx  # noqa: E402

rx.set_logical_devices(8)

# With XLA's older code for fused operations tests compile in half of the time. XLA for
# TPUs does not know this flag, nor do later versions for CPUs, and both abort at a flag
# that they do not know: it is set where programs for CPUs only are compiled. This
# process reads it now; `startup/sitecustomize.py` sets it in those that tests start.
if os.environ.get("JAX_PLATFORMS") == "cpu" and jax.__version__.startswith("0.10."):
    _OLD = os.environ["REPLICAX_TESTS_XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false"
    )
    # A process of pytest-xdist has it already.
    _flags = os.environ.get("XLA_FLAGS", "").replace(f" {_OLD}", "")
    if "optimization_level=0" in _flags:
        os.environ["XLA_FLAGS"] = f"{_flags} {_OLD}"
        jax.devices()
        os.environ["XLA_FLAGS"] = _flags

# Tests compile the same programs again and again: pytest-xdist's processes share them.
# Those that tests start compile their own.
_PROGRAMS = "REPLICAX_TESTS_PROGRAMS"
if _PROGRAMS not in os.environ:
    os.environ[_PROGRAMS] = tempfile.mkdtemp("-programs")
jax.config.update("jax_compilation_cache_dir", os.environ[_PROGRAMS])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _put(self: LRUCache, key: str, value: bytes) -> None:
    """Add a program, whole: JAX writes it where others read it meanwhile, and warn."""
    entry = Path(str(self.path), f"{key}-cache")
    handle, whole = tempfile.mkstemp(dir=entry.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(value)
    os.replace(whole, entry)


LRUCache.put = _put

import threading  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

from replicax._util import waiting  # noqa: E402
from replicax.engine.scope import current_context, current_strategy  # noqa: E402

# A loaded machine must not add lines to logs that tests compare.
waiting.FIRST_SECONDS = 60.0

# Nor fail tests that are slow for it.
settings.register_profile(
    "loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("loaded")

# What is imported stays: a collection of garbage, which tests ask for, need not see it.
# Others are rare: tests build large graphs of objects, and walking them again and again
# took a twelfth of the time.
gc.freeze()
gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """`slow(but=[...])` spares those cases, by their names in brackets.

    A name that no case has is an error: it would leave all of them to `make test-all`.
    """
    spared: dict[str, set[str]] = {}
    for item in items:
        mark = next((m for m in item.own_markers if "but" in m.kwargs), None)
        if mark is None:
            continue
        function, _, case = item.nodeid.removesuffix("]").partition("[")
        missing = spared.setdefault(function, set(mark.kwargs["but"]))
        if case in mark.kwargs["but"]:
            missing.discard(case)
            item.own_markers.remove(mark)
    wrong = {name: cases for name, cases in spared.items() if cases}
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(
            f"slow(but=...) names cases that are not there: {wrong}"
        )


DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="module", autouse=True)
def collections_stay_small() -> Iterator[None]:
    """What a module leaves, as JAX's caches, no later collection of garbage walks.

    Walked each time, it took a tenth of the time of all tests.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Same random numbers for every test; no open scope and no thread afterwards."""
    keras.utils.set_random_seed(0)
    before = set(threading.enumerate())
    yield
    assert current_strategy() is None, "the test left a strategy's scope open"
    assert current_context() is None, "the test left a replica context open"
    new = [t for t in set(threading.enumerate()) - before if "replicax" in t.name]
    # One thread of the process writes all checkpoints.
    left = [t for t in new if not t.name.startswith("replicax-checkpoint")]
    for thread in left:
        thread.join(timeout=5)
    assert not [t for t in left if t.is_alive()], f"threads still running: {left}"


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 real 8x8 digits: `float32[1797, 64]` in 0..1 and `int32[1797]`."""
    images, labels = map(np.asarray, load_digits(return_X_y=True))
    return (images / 16).astype("float32"), labels.astype("int32")


def mirrored(num_replicas: int) -> rx.MirroredStrategy:
    """A MirroredStrategy over the first `num_replicas` logical devices."""
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


def values_of(result: object) -> tuple[jax.Array, ...]:
    """This process' values of a result of `run`; one a device if it is equal."""
    if isinstance(result, rx.PerReplica):
        return result.values
    assert isinstance(result, jax.Array)
    return tuple(shard.data for shard in result.addressable_shards)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory with options such as `size=64k`, or skips."""
    folders: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"mounted-{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system is not permitted")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        # Lazily: threads that write arrays may close their files a moment later.
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def data_dir() -> Path:
    """The folder with MNIST and the image sets; tests that need it skip without."""
    if not DATA.is_dir():
        pytest.skip(f"data folder {DATA.name} is not here")
    return DATA
