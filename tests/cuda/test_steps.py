"""Steps of every strategy, compiled by the real CUDA compiler; no card runs them.

`make test-cuda` runs these: the compiler is 5 GB. Looked at is what the program sends,
what it updates in place, and whether its work is done where it should be.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import keras
import pytest
from tests.cuda.steps import TRAINERS, Step, compiled_step

import replicax as rx
import replicax.testing
from replicax.planning.capture import capture_fit
from replicax.planning.compiler import require_cuda
from replicax.planning.topology import find_topology
from replicax.strategies.strategy import Strategy

try:
    require_cuda("h100:8")
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CARDS = {"h100:1": 1, "h100:8": 8, "h100:2x8": 16}
LOCAL = ["cpu:0", "cpu:1"]

# Both tell their first axis; the second is made of two neighbours.
BY_TWO = {n: [range(i, i + 2) for i in range(0, n, 2)] for n in CARDS.values()}
ACROSS = {n: [range(i, n, 2) for i in range(2)] for n in CARDS.values()}

# The loss and the accuracy: a sum and a count of each.
SCALARS = {"fit": 16, "tape": 0, "value_and_grad": 0}

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one device": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: rx.MirroredStrategy(LOCAL),
    "multi-worker": rx.MultiWorkerMirroredStrategy,
    "virtual replicas": lambda: rx.MirroredStrategy(LOCAL, replicas_per_device=2),
    "sharded update": lambda: rx.MirroredStrategy(LOCAL, shard_update=True),
    "fully sharded": lambda: rx.FullyShardedStrategy(devices=LOCAL),
    "model parallel": lambda: rx.ModelParallelStrategy(
        rx.layout_maps.DENSE, model_parallel=2, devices=LOCAL
    ),
    "central storage": lambda: rx.CentralStorageStrategy(LOCAL, "cpu:2"),
}
# What is of one process has the cards of one host.
HARDWARE: dict[str, list[str]] = {
    "one device": ["h100:1", "h100:8", "h100:2x8"],
    "mirrored": ["h100:1", "h100:8"],
    "multi-worker": ["h100:1", "h100:2x8"],
    "virtual replicas": ["h100:1", "h100:8", "h100:2x8"],
    "sharded update": ["h100:1", "h100:8", "h100:2x8"],
    "fully sharded": ["h100:1", "h100:8", "h100:2x8"],
    "model parallel": ["h100:8", "h100:2x8"],
    "central storage": ["h100:1", "h100:8"],
}
CASES = [
    pytest.param(name, trainer, topology, id=f"{name}-{trainer}-{topology}")
    for name, topologies in HARDWARE.items()
    for topology in topologies
    for trainer in TRAINERS
]


@pytest.mark.parametrize(("name", "trainer", "topology"), CASES)
def test_a_step_of(name: str, trainer: str, topology: str) -> None:
    step = compiled_step(STRATEGIES[name], trainer, topology)
    num_cards = 1 if name == "one device" else CARDS[topology]
    assert_sends(step, name, num_cards, SCALARS[trainer])
    assert_updates_in_place(step, is_made_elsewhere=name == "central storage")
    assert_stays_on_the_card(step)
    assert_multiplies_in(step, "bf16")


def assert_sends(step: Step, name: str, num_cards: int, scalars: int) -> None:
    """The collectives that the strategy means, and no other."""
    kinds = {c.kind for c in step.collectives}
    sums = step.weights + step.statistics + scalars
    if num_cards == 1:
        assert not step.collectives
    elif name in ("sharded update", "fully sharded"):
        assert kinds == {"all-reduce", "reduce-scatter", "all-gather"}
        assert step.scattered > 10 * sums
        assert step.sent("all-reduce") == sums
        assert step.sent("reduce-scatter") == step.scattered
        gathered = step.sent("all-gather")
        if name == "sharded update":  # New weights, for all.
            assert gathered == step.scattered
        else:
            # In bfloat16, as they multiply: for the forward pass, and again for the
            # backward pass but where nothing before the layer is trained.
            once = 2 * step.scattered_elements
            assert once < gathered <= 2 * once
    elif name == "model parallel":
        assert step.sent("all-reduce", ACROSS[num_cards]) == sums
        # XLA sends activations, within a replica only.
        groups = {frozenset(map(tuple, c.groups)) for c in step.collectives}
        assert groups == {
            frozenset(map(tuple, of[num_cards])) for of in (ACROSS, BY_TWO)
        }
    else:
        assert kinds == {"all-reduce"}
        assert step.sent("all-reduce") == sums
        assert {c.groups for c in step.collectives} == {(tuple(range(num_cards)),)}
        assert all(c.is_async for c in step.collectives)


def assert_updates_in_place(step: Step, *, is_made_elsewhere: bool) -> None:
    if is_made_elsewhere:  # An error leaves all as it was.
        assert step.aliased == 0
    else:
        # All but what a step only reads: a learning rate, metrics without `fit`.
        assert step.state - 64 <= step.aliased <= step.state


def assert_stays_on_the_card(step: Step) -> None:
    assert not step.to_the_host
    assert "f64" not in step.types


def assert_multiplies_in(step: Step, dtype: str) -> None:
    """Convolutions by cuDNN, products by cuBLAS or Triton, in one type."""
    assert len(step.convolutions) == 2  # Of the input nobody wants a gradient.
    assert set(step.convolutions) == {(dtype, "cudnn")}
    assert len(step.products) >= 5  # Likewise, of two layers all three.
    assert set(step.products) <= {(dtype, "cublas"), (dtype, "triton")}


def test_single_precision_stays_single() -> None:
    step = compiled_step(STRATEGIES["mirrored"], "fit", "h100:8", "float32")
    assert "bf16" not in step.types
    assert_multiplies_in(step, "f32")


@pytest.mark.parametrize(
    ("topology", "is_by_cudnn"), [("h100:1", True), ("v100:1", False)]
)
def test_attention_is_by_cudnn_where_a_card_has_it(
    topology: str, is_by_cudnn: bool
) -> None:
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        strategy = rx.MirroredStrategy(["cpu:0"])
        with strategy.scope():
            x = keras.Input((64, 128))
            heads = keras.layers.MultiHeadAttention(2, 64)
            model = keras.Model(x, heads(x, x, use_causal_mask=True))
            model.compile("adam", "mse")
        rows = jax.ShapeDtypeStruct((8, 64, 128), "float32")
        hardware = find_topology(topology)
        capture = capture_fit(strategy, model, (rows, rows), hardware)
    finally:
        keras.mixed_precision.set_global_policy(before)
    assert capture.lowered is not None
    text = capture.lowered.as_text()
    assert ("__cudnn$fmhaSoftmax" in text) == is_by_cudnn


def worker_step(trainer: str) -> Step:
    return compiled_step(rx.ParameterServerStrategy, trainer, "h100:8")


@pytest.mark.multiprocess
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_step_of_a_worker_of_parameter_servers(trainer: str) -> None:
    pytest.importorskip("pyarrow")
    results = replicax.testing.run(
        worker_step,
        args=(trainer,),
        tasks={"worker": 1, "ps": 1},
        logical_devices=2,
        deadline_seconds=500,
    )
    step = results["worker:0"].value
    assert_sends(step, "parameter server", 8, SCALARS[trainer])
    assert_updates_in_place(step, is_made_elsewhere=True)
    assert_stays_on_the_card(step)
    assert_multiplies_in(step, "bf16")


def test_programs_for_described_cards_stay_out_of_the_cache(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    old = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (str(tmp_path), 0, -1), strict=True):
        jax.config.update(name, value)
    try:
        strategy = rx.MirroredStrategy(LOCAL)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
            model.compile("sgd", "mse")
        shape = jax.ShapeDtypeStruct((64, 8), "float32")
        target = jax.ShapeDtypeStruct((64, 4), "float32")
        for _ in range(2):
            rx.plan(strategy, model, (shape, target), topology="h100:8")
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
    assert not [w for w in recwarn if "persistent compilation cache" in str(w.message)]
    assert not list(tmp_path.glob("jit_program*"))
