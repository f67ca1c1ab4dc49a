"""Plans of steps whose FLOPs, bytes and collectives are known by hand."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

import replicax as rx
from replicax.errors import DeviceError
from replicax.planning.capture import Capture
from replicax.planning.report import Plan
from replicax.planning.topology import find_topology
from replicax.strategies.dry_run import dry_running

TPUS = ["v4:2x2x1", "v5e:2x4", "v5e:16x16", "v5p:4x4x4", "v6e:4x4"]
SIZES = {"cpu:4": 4, "cpu:8": 8, "v4:2x2x1": 4, "v5e:2x4": 8, "v5e:16x16": 256}
SIZES |= {"v5p:4x4x4": 64, "v6e:4x4": 16}
ROWS, INPUTS, HIDDEN, CLASSES = 32, 64, 256, 16

# Two dense layers with biases.
NUM_WEIGHTS = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
# Forward, gradients of both kernels, and the one of the hidden layer.
MATMUL_FLOPS = 2 * ROWS * (2 * INPUTS * HIDDEN + 3 * HIDDEN * CLASSES)


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def local_strategy() -> rx.MirroredStrategy:
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def make_model(strategy: Any, optimizer: Any = "sgd") -> keras.Model:
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((INPUTS,)),
                keras.layers.Dense(HIDDEN, activation="relu"),
                keras.layers.Dense(CLASSES),
            ]
        )
        model.compile(optimizer=optimizer, loss="mse")
    return model


def batch_for(topology: str, rows: int = ROWS) -> tuple[Any, Any]:
    size = SIZES[topology] * rows
    return struct(size, INPUTS), struct(size, CLASSES)


def hardware(names: list[str]) -> Any:
    return pytest.mark.parametrize("topology", names, indirect=True)


@pytest.fixture
def topology(request: pytest.FixtureRequest) -> str:
    if not request.param.startswith("cpu"):
        request.getfixturevalue("tpu_compiler")
    return request.param


def assert_known_answers(plan: Plan, topology: str) -> None:
    assert plan.num_devices == plan.num_replicas == SIZES[topology]
    # Elementwise work is small beside the products.
    assert MATMUL_FLOPS < plan.flops < 1.25 * MATMUL_FLOPS
    (reduce,) = {c.kind for c in plan.collectives}
    assert reduce == "all-reduce"
    sums = sum(c.bytes * c.count for c in plan.collectives)
    # The gradients, and a few numbers for the loss.
    assert 0 <= sums - 4 * NUM_WEIGHTS <= 64
    for c in plan.collectives:
        assert (c.group_size, c.num_groups) == (SIZES[topology], 1)
        assert c.seconds > 0
    memory = plan.memory
    batch = 4 * ROWS * (INPUTS + CLASSES)
    assert memory.arguments >= 4 * NUM_WEIGHTS + batch
    assert memory.aliased >= 4 * NUM_WEIGHTS
    assert memory.peak > memory.arguments
    assert plan.fits
    assert plan.time.compute == pytest.approx(plan.flops / plan.rates.peak_flops)


@pytest.mark.slow(but=["cpu:4", "v5e:2x4", "v5e:16x16"])
@hardware(["cpu:4", "cpu:8", *TPUS])
def test_fit(topology: str) -> None:
    strategy = local_strategy()
    model = make_model(strategy)
    plan = rx.plan(strategy, model, batch_for(topology), topology=topology)
    assert plan.program == "Sequential.train_step"
    assert_known_answers(plan, topology)


@hardware(["cpu:4", "v5e:2x4"])
def test_a_custom_loop(topology: str) -> None:
    strategy = local_strategy()
    model = make_model(strategy)
    optimizer = model.optimizer
    size = SIZES[topology]

    def train_step(batch: Any) -> Any:
        x, y = batch
        with rx.GradientTape() as tape:
            losses = keras.losses.mean_squared_error(y, model(x))
            loss = rx.compute_average_loss(losses, global_batch_size=size * ROWS)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    batch = (
        rx.PerReplica(struct(size, ROWS, INPUTS)),
        rx.PerReplica(struct(size, ROWS, CLASSES)),
    )
    plan = rx.plan(strategy, train_step, (batch,), topology=topology)
    assert plan.program == "train_step"
    assert_known_answers(plan, topology)
    # A batch of the strategy's own stands for entries like those.
    own = jax.tree.map(lambda x: np.zeros((2, *x.shape[1:]), x.dtype), batch)
    again = rx.plan(strategy, train_step, (own,), topology=topology)
    assert again.flops == plan.flops
    assert without_times(again) == without_times(plan)


def test_a_plan_leaves_the_model_unchanged() -> None:
    strategy = local_strategy()
    model = make_model(strategy, "adam")
    x = np.random.default_rng(0).random((64, INPUTS), np.float32)
    y = np.zeros((64, CLASSES), np.float32)
    history = model.fit(x, y, batch_size=32, verbose=0)
    before = [
        np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]
    ]
    where = [v.value.sharding for v in model.variables]
    rx.plan(strategy, model, batch_for("cpu:8"), topology="cpu:8")
    after = [
        np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]
    ]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert [v.value.sharding for v in model.variables] == where
    assert model.history is history
    assert strategy.num_replicas_in_sync == 2
    first = history.history["loss"][-1]
    assert model.fit(x, y, batch_size=32, verbose=0).history["loss"][-1] < first


def test_a_model_that_never_trained_trains_afterwards() -> None:
    strategy = local_strategy()
    model = make_model(strategy, "adam")
    rx.plan(strategy, model, batch_for("cpu:4"), topology="cpu:4")
    x, y = np.ones((64, INPUTS), "float32"), np.zeros((64, CLASSES), "float32")
    losses = model.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    for variable in [*model.variables, *model.optimizer.variables]:
        assert len(variable.value.sharding.device_set) == 2
    strategy.check_replicas()


@pytest.mark.slow
def test_several_steps_per_execution_count_for_one() -> None:
    strategy = local_strategy()
    model = make_model(strategy)
    one = rx.plan(strategy, model, batch_for("cpu:8"), topology="cpu:8")
    model.steps_per_execution = 4
    many = rx.plan(strategy, model, batch_for("cpu:8"), topology="cpu:8")
    assert many.flops == pytest.approx(one.flops, rel=0.05)
    for plan in (one, many):
        total = sum(c.bytes * c.count for c in plan.collectives)
        assert total == pytest.approx(4 * NUM_WEIGHTS, rel=0.01)


def test_a_plan_for_one_device_of_this_machine() -> None:
    strategy = rx.OneDeviceStrategy("cpu:0")
    batch = struct(ROWS, INPUTS), struct(ROWS, CLASSES)
    plan = rx.plan(strategy, make_model(strategy), batch, topology="cpu:8")
    assert (plan.num_devices, plan.num_replicas) == (1, 1)
    assert not plan.collectives
    assert plan.assumptions[0].startswith("The rates measured here, ")
    assert not any("bfloat16" in text or "chip" in text for text in plan.assumptions)


@pytest.mark.slow(but=["v5e:2x4"])
@hardware(["v5e:2x4"])
def test_scaling(topology: str) -> None:
    strategy = local_strategy()
    plan = rx.plan(strategy, make_model(strategy), batch_for(topology))
    assert plan.topology == "v5e:16x16"  # The default; a batch for 8 is smaller there.
    sizes = [s.num_devices for s in plan.scaling]
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert plan.scaling[0].efficiency == 1
    assert all(0 < s.efficiency <= 1 for s in plan.scaling)
    assert plan.scaling[-1].hardware == "16x16"
    busy = max(plan.time.compute, plan.time.memory)
    assert plan.scaling[-1].efficiency == pytest.approx(busy / plan.time.total)
    # A larger batch per chip hides more of the same sum.
    large = rx.plan(
        strategy, make_model(strategy), batch_for("v5e:16x16", 4096), topology="v5e:2x4"
    )
    assert large.scaling[-1].efficiency > plan.scaling[-1].efficiency


@pytest.mark.usefixtures("tpu_compiler")
def test_two_slices_communicate_over_the_network() -> None:
    strategy = local_strategy()
    batch = struct(16 * ROWS, INPUTS), struct(16 * ROWS, CLASSES)
    plan = rx.plan(
        strategy, make_model(strategy), batch, topology="v5e:2x4", num_slices=2
    )
    assert (plan.topology, plan.num_slices, plan.num_hosts) == ("2 x v5e:2x4", 2, 4)
    assert max(c.num_slices for c in plan.collectives) == 2
    assert plan.time.network > 0
    between = [c for c in plan.collectives if c.num_slices == 2]
    assert {(c.kind, c.group_size, c.num_groups) for c in between} == {
        ("all-reduce", 2, 8)
    }
    # Each of 8 chips sends its part of the gradients, with some padding.
    sent = sum(c.bytes * c.count for c in between)
    assert 4 * NUM_WEIGHTS / 8 <= sent < 4 * NUM_WEIGHTS / 4
    assert [s.hardware for s in plan.scaling][-2:] == ["2x4", "2 x 2x4"]
    assert plan.scaling[-1].efficiency < plan.scaling[-2].efficiency


@pytest.mark.usefixtures("tpu_compiler")
def test_a_step_that_does_not_fit() -> None:
    strategy = local_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        model.compile(optimizer="sgd", loss="mse")

    def step(x: Any) -> Any:
        with rx.GradientTape() as tape:
            wide = keras.ops.exp(keras.ops.matmul(x, keras.ops.transpose(x)))
            rows = keras.ops.sort(wide, axis=-1)[:, :8]
            loss = keras.ops.mean(model(rows))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    rows = 100_000  # 40 GB of float32 for `wide`, and sorting fuses with nothing.
    x = rx.PerReplica(struct(4, rows, 8))
    plan = rx.plan(strategy, step, (x,), topology="v5e:2x2")
    assert not plan.fits
    assert plan.limit == "memory capacity"
    assert plan.time is None
    assert plan.scaling == ()
    assert any("HBM" in note or "hbm" in note for note in plan.notes)
    assert "does not fit" in shown(plan)
    with pytest.raises(ValueError, match="does not fit"):
        plan.write_figure("never.png")


def without_times(plan: Plan) -> list[Any]:
    # Rates of this machine are measured anew.
    return [dataclasses.replace(c, seconds=None) for c in plan.collectives]


def shown(plan: Plan) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    plan.show(console)
    return console.export_text()


@pytest.mark.filterwarnings("error")  # Of data of 64 bits as well.
def test_a_step_that_does_not_train_is_an_error() -> None:
    strategy = local_strategy()
    model = make_model(strategy)
    with pytest.raises(ValueError, match="does not train: no optimizer"):
        rx.plan(
            strategy, lambda x: model(x), (np.zeros((4, INPUTS)),), topology="cpu:2"
        )
    assert strategy.num_replicas_in_sync == 2
    with pytest.raises(TypeError, match="a model takes its batch as args"):
        rx.plan(strategy, model, (), {"x": 1}, topology="cpu:2")
    with pytest.raises(DeviceError, match="unknown topology"):
        rx.plan(strategy, model, (), topology="abacus:3")


def test_rx_plan_refuses_a_watched_step() -> None:
    strategy = rx.MirroredStrategy(["cpu:0"])

    def train_step(state, x):
        return state + x.sum()

    step = strategy.watch(jax.jit(train_step))
    shape = jax.ShapeDtypeStruct((), "float32")
    with pytest.raises(TypeError, match=r"train_step.*replicax plan --topology cpu:2"):
        rx.plan(strategy, step, (shape, shape), topology="cpu:2")


def test_variables_off_the_replicas_are_an_error() -> None:
    strategy = rx.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter_device="cpu:2")
    model = make_model(strategy)
    with pytest.raises(
        NotImplementedError,
        match=r"CentralStorageStrategy live apart.*such as rx\.MirroredStrategy",
    ):
        rx.plan(strategy, model, batch_for("cpu:4"), topology="cpu:4")


def test_a_diverging_step_is_an_error_as_in_run() -> None:
    strategy = local_strategy()
    model = make_model(strategy)

    def step() -> None:
        weight = model.trainable_variables[0]
        index = rx.get_replica_context().replica_id_in_sync_group
        model.optimizer.apply([keras.ops.ones(weight.shape)], [weight])
        weight.assign(weight + keras.ops.cast(index, "float32"))

    with pytest.raises(rx.DivergenceError, match="differs between"):
        rx.plan(strategy, step, topology="cpu:2")


# Names in version 1 of the JSON format.
NAMES = {
    "": "format program topology device_kind num_devices num_replicas num_hosts "
    "num_slices rates fits memory flops bytes_accessed collectives time scaling limit "
    "advice notes assumptions",
    "rates": "peak_flops memory_bytes memory_bandwidth ring_bandwidth source "
    "network_bandwidth flops_by_type elementwise_flops attained_flops "
    "attained_bandwidth kernel_seconds",
    "memory": "arguments outputs aliased temporaries code capacity peak",
    "collectives": "kind dtype count bytes group_size num_groups spans_hosts "
    "num_slices is_async seconds",
    "time": "compute memory busy links network exposed total",
    "scaling": "num_devices hardware efficiency",
}


@hardware(["cpu:4", "v5e:2x4"])
def test_json_report_and_figure(topology: str, tmp_path: Path) -> None:
    strategy = local_strategy()
    plan = rx.plan(
        strategy, make_model(strategy), batch_for(topology), topology=topology
    )
    plan.write_json(tmp_path / "plan.json")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["format"] == 1
    for name, names in NAMES.items():
        part = values[name] if name else values
        for entry in part if isinstance(part, list) else [part]:
            assert set(entry) == set(names.split())
    assert values["memory"]["peak"] == plan.memory.peak
    text = shown(plan)
    for part in ("Sequential.train_step", "all-reduce", "First limit", "not run"):
        assert part in text
    assert plan.rates.source[:30] in text
    plan.write_figure(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@hardware(["v5e:2x4"])
def test_divided_updates_scatter_and_gather(topology: str) -> None:
    plans = []
    for shard_update in (False, True):
        strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_update=shard_update)
        with strategy.scope():
            model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1024)])
            model.compile(optimizer="adam", loss="mse")
        batch = struct(512, 512), struct(512, 1024)
        plans.append(rx.plan(strategy, model, batch, topology=topology))
    whole, divided = plans
    assert {c.kind for c in whole.collectives} == {"all-reduce"}
    assert {c.kind for c in divided.collectives} >= {"reduce-scatter", "all-gather"}
    # Of both slots, 7 of 8 chips' parts are gone.
    slots = 2 * 4 * 512 * 1024
    saved = whole.memory.arguments - divided.memory.arguments
    assert saved == pytest.approx(slots * 7 / 8, rel=0.02)


@hardware(["v5e:2x4"])
def test_programs_for_described_devices_stay_out_of_the_cache(
    topology: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    wanted: dict[str, Any] = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    old = {name: jax.config.values[name] for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # It decides once which folder it uses.
    try:
        strategy = local_strategy()
        model = make_model(strategy)
        for _ in range(2):
            rx.plan(strategy, model, batch_for(topology), topology=topology)
        assert not list(tmp_path.glob("jit_program*"))
        jax.jit(lambda x: x + 1)(np.ones(3))
        assert list(tmp_path.iterdir())  # It is on again for what is run here.
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert not [w for w in recwarn if "persistent compilation cache" in str(w.message)]


def test_one_plan_at_a_time() -> None:
    strategy = local_strategy()
    model = make_model(strategy)
    outer = Capture(find_topology("cpu:2"))
    with (
        dry_running(outer),
        pytest.raises(RuntimeError, match="another plan is in progress"),
    ):
        rx.plan(strategy, model, batch_for("cpu:4"), topology="cpu:4")
    assert strategy.num_replicas_in_sync == 2


@hardware(["v5e:2x4"])
def test_two_chips_work_on_one_replica(topology: str) -> None:
    strategy = rx.ModelParallelStrategy(
        rx.layout_maps.DENSE, model_parallel=2, devices=["cpu:0", "cpu:1"]
    )
    model = make_model(strategy)
    batch = struct(4 * ROWS, INPUTS), struct(4 * ROWS, CLASSES)
    plan = rx.plan(strategy, model, batch, topology=topology)
    assert (plan.num_devices, plan.num_replicas) == (8, 4)
    groups = {(c.kind, c.group_size, c.num_groups) for c in plan.collectives}
    assert ("all-reduce", 4, 2) in groups  # Gradients, over the replicas.
    with dry_running(Capture(find_topology(topology))):
        made_there = rx.ModelParallelStrategy(rx.layout_maps.DENSE, model_parallel=4)
        assert made_there.num_replicas_in_sync == 2
        of_a_host = rx.ModelParallelStrategy(rx.layout_maps.DENSE)
        assert of_a_host.num_replicas_in_sync == 2
