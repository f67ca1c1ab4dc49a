"""Variables that would differ between replicas are refused when a step is traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental.pallas import pallas_call
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from keras import layers, ops
from tests.conftest import mirrored

import replicax as rx
from replicax.engine.checks.divergence import (
    declare_mirrored,
    gradient_marks,
    result_marks,
)


@pytest.fixture
def strategy() -> rx.Strategy:
    return mirrored(2)


def own(x: Any) -> Any:
    """`x` plus the replica's number: differs between replicas."""
    return x + rx.get_replica_context().replica_id_in_sync_group


def total(x: Any) -> Any:
    return rx.get_replica_context().all_reduce("sum", x)


@jax.custom_vjp
def scaled_by_index(x: Any) -> Any:
    """`x`, whose gradient differs between replicas."""
    return x


scaled_by_index.defvjp(
    lambda x: (x, None), lambda _, g: (g * lax.axis_index("replica"),)
)


def add_index(x: Any, out: Any) -> None:
    out[...] = x[...] + lax.axis_index("replica")


def add_one(x: Any, out: Any) -> None:
    out[...] = x[...] + 1.0


# Assignments that differ, as functions of (batch of this replica, mirrored value).
DIFFERENT: dict[str, Callable[[Any, Any], Any]] = {
    "argument": lambda x, w: w + x,
    "replica id": lambda x, w: own(w),
    "half reduced": lambda x, w: total(x) + x,
    "selected by it": lambda x, w: jnp.where(x > 0, w, -w),
    "jit": lambda x, w: jax.jit(lambda x: x * w)(x),
    "remat": lambda x, w: jax.checkpoint(lambda x: jnp.sin(x) * w)(x),
    "custom_jvp": lambda x, w: jax.nn.relu(x) + w,
    "vmap": lambda x, w: jax.vmap(lambda a: a * x)(jnp.ones(3) * w).sum(),
    "gradient": lambda x, w: jax.grad(lambda w: w * w * x)(w),
    "scan carry": lambda x, w: lax.scan(lambda c, _: (c + x, None), w, length=2)[0],
    "scan output": lambda x, w: lax.scan(lambda c, a: (c, a * x), w, jnp.ones(3))[
        1
    ].sum(),
    "scan input": lambda x, w: lax.scan(lambda c, a: (c + a, a), w, x * jnp.ones(3))[0],
    "late in a scan": lambda x, w: lax.scan(
        lambda c, _: ((c[0] + c[1], c[1] + c[2], x), None), (w, w, w), length=4
    )[0][0],
    "while body": lambda x, w: lax.while_loop(lambda c: c < 9, lambda c: c + x + 1, w),
    "while length": lambda x, w: lax.while_loop(lambda c: c < x, lambda c: c + 1, w),
    "while length of another": lambda x, w: lax.while_loop(
        lambda c: c[0] < x, lambda c: (c[0] + 1, c[1] * 2), (0.0, w)
    )[1],
    "fori": lambda x, w: lax.fori_loop(0, 3, lambda i, c: c * x, w),
    "cond choice": lambda x, w: lax.cond(x > 0, lambda: w, lambda: -w),
    "cond operand": lambda x, w: lax.cond(w > 0, lambda: w * x, lambda: w),
    "switch": lambda x, w: lax.switch(x.astype("int32"), [lambda: w, lambda: 2 * w]),
    "callback": lambda x, w: jax.pure_callback(
        lambda w: np.asarray(w), jax.ShapeDtypeStruct((), "float32"), w
    ),
    "callback of io": lambda x, w: io_callback(
        lambda w: np.asarray(w), jax.ShapeDtypeStruct((), "float32"), w
    ),
    "callback in a solver": lambda x, w: lax.custom_linear_solve(
        lambda a: a,
        w,
        lambda _, b: jax.pure_callback(
            lambda b: np.asarray(b), jax.ShapeDtypeStruct((), "float32"), b
        ),
    ),
    "permuted": lambda x, w: lax.ppermute(w, "replica", [(0, 1)]),
    "scattered": lambda x, w: lax.psum_scatter(w * jnp.ones(2), "replica")[()],
    "sum in groups": lambda x, w: lax.psum(
        own(w), "replica", axis_index_groups=[[0], [1]]
    ),
    "sum in other groups": lambda x, w: lax.psum(
        w, "replica", axis_index_groups=[[0], [1]]
    ),
    "sort": lambda x, w: jnp.sort(jnp.stack([x, w]))[0],
    "rng": lambda x, w: jax.random.normal(jax.random.key(own(0))),
    "rng of the device": lambda x, w: lax.rng_uniform(0.0, 1.0, ()),
    "rng of the device in a loop": lambda x, w: lax.while_loop(
        lambda c: c < lax.rng_uniform(0.0, 9.0, ()), lambda c: c + 1, w
    ),
    "rng of the device in a branch": lambda x, w: lax.cond(
        w > 0, lambda: lax.rng_uniform(0.0, 1.0, ()), lambda: w
    ),
    "rule of a gradient": lambda x, w: jax.grad(scaled_by_index)(w),
    "kernel": lambda x, w: pallas_call(
        add_index, jax.ShapeDtypeStruct((8,), "float32"), interpret=True
    )(w * jnp.ones(8))[0],
    "reduced in one branch": lambda x, w: lax.cond(
        w > 0, lambda: x, lambda: jnp.zeros(())
    ),
}

# Assignments that are equal on all replicas.
EQUAL: dict[str, Callable[[Any, Any], Any]] = {
    "constant": lambda x, w: 3.0,
    "mirrored": lambda x, w: w * 2,
    "all_reduce": lambda x, w: total(x) * w,
    "all_gather": lambda x, w: rx.get_replica_context().all_gather(x[None], 0).sum(),
    "psum": lambda x, w: lax.psum(x, "replica"),
    "pmax": lambda x, w: lax.pmax(x, "replica"),
    "pmin": lambda x, w: lax.pmin(x, ("replica",)),
    "shape": lambda x, w: w * x.size,
    "where on a sum": lambda x, w: jnp.where(total(x) > 0, w, -w),
    "cond on a sum": lambda x, w: lax.cond(total(x) > 0, lambda: w, lambda: -w),
    "while on a sum": lambda x, w: lax.while_loop(
        lambda c: c < total(x), lambda c: c + 1, w
    ),
    "scan with sums": lambda x, w: lax.scan(
        lambda c, _: (c + total(x * c), None), w, length=3
    )[0],
    "scan, carry untouched": lambda x, w: lax.scan(
        lambda c, _: ((c[0] + 1, c[1] * x), None), (w, x), length=3
    )[0][0],
    "gradient of sums": lambda x, w: total(jax.grad(lambda w: w * x)(w)),
    "jit": lambda x, w: jax.jit(lambda x, w: (x, w + 1))(x, w)[1],
    "rng": lambda x, w: jax.random.normal(jax.random.key(0)) * w,
    "rng of XLA": lambda x, w: jax.random.normal(jax.random.key(0, impl="rbg")) * w,
    "rng of XLA, split": lambda x, w: (
        w * jax.random.normal(jax.random.split(jax.random.key(0, impl="unsafe_rbg"))[1])
    ),
    "printed": lambda x, w: (jax.debug.print("{}", x), w)[1],
    "solver of sums": lambda x, w: lax.custom_linear_solve(
        lambda a: a * lax.psum(1.0, "replica"), w, lambda _, b: b / 2
    ),
    "kernel": lambda x, w: pallas_call(
        add_one, jax.ShapeDtypeStruct((8,), "float32"), interpret=True
    )(w * jnp.ones(8))[0],
    "merge_call": lambda x, w: rx.get_replica_context().merge_call(
        lambda strategy, x: strategy.reduce("mean", x), (x,)
    ),
}


def assigns(fn: Callable[[Any, Any], Any], strategy: rx.Strategy) -> np.ndarray:
    """Run `w.assign(fn(x, w))`; the replicas' copies of `w` afterwards."""
    with strategy.scope():
        w = keras.Variable(1.0, name="weight")

    def step(x: Any) -> None:
        w.assign(jnp.asarray(fn(x, w.value), "float32"))

    strategy.run(step, (rx.PerReplica(np.float32([0.0, 1.0])),))
    return np.stack([shard.data for shard in w.value.addressable_shards])


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_values_are_refused(name, strategy) -> None:
    with pytest.raises(
        rx.DivergenceError, match=r"run\(.*step.*'weight' \(\) differs.*all_reduce"
    ):
        assigns(DIFFERENT[name], strategy)


def test_reads_of_a_mutable_array_are_not_known_to_be_equal(monkeypatch) -> None:
    """The pass does not follow what a loop or a callee stores."""
    monkeypatch.setenv("REPLICAX_CPU", "off")

    def step(x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(()))

        def body(carry: Any, _: Any) -> Any:
            ref[...] = ref[...] + x
            return carry, None

        lax.scan(body, 0, length=2)
        return ref[...]

    out = mirrored(2).run(step, (rx.PerReplica(np.float32([0.0, 1.0])),))
    np.testing.assert_array_equal(np.asarray(out), [0.0, 2.0])


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_are_accepted(name, strategy) -> None:
    copies = assigns(EQUAL[name], strategy)
    assert copies[0] == copies[1]


def test_refused_step_leaves_the_variable_as_it_was(strategy) -> None:
    with strategy.scope():
        w = keras.Variable(1.0)

    def step(x: Any) -> None:
        w.assign(x)

    for _ in range(2):
        with pytest.raises(rx.DivergenceError, match="differs between replicas"):
            strategy.run(step, (rx.PerReplica(np.float32([0.0, 1.0])),))
        assert float(w.value) == 1.0


def test_one_replica_diverges_from_nobody() -> None:
    strategy = rx.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        w = keras.Variable(1.0)
    strategy.run(w.assign, (rx.PerReplica(np.float32([5.0])),))
    assert float(w.value) == 5.0


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sum", lambda start, x: x.sum()),
        ("mean", lambda start, x: x.mean()),
        ("only_first_replica", lambda start, x: x[0]),
    ],
)
def test_aggregation_says_how_writes_are_combined(
    num_replicas, aggregation, expected
) -> None:
    strategy = mirrored(num_replicas)
    with strategy.scope():
        w = keras.Variable(3.0, trainable=False, aggregation=aggregation)
    x = np.arange(1.0, num_replicas + 1, dtype="float32")

    def step(x: Any) -> Any:
        w.assign(x)
        return w.value

    seen = strategy.run(step, (rx.PerReplica(x),))
    # Inside the step each replica sees what it wrote itself.
    np.testing.assert_array_equal(np.asarray(seen), x)
    assert float(w.value) == expected(3.0, x)
    strategy.run(step, (rx.PerReplica(x),))
    strategy.check_replicas()


MODELS: dict[str, Callable[[], list[Any]]] = {
    "gru": lambda: [layers.GRU(3, dropout=0.1, recurrent_dropout=0.1)],
    "bidirectional": lambda: [layers.Bidirectional(layers.SimpleRNN(3))],
    "spectral": lambda: [
        layers.SpectralNormalization(layers.Dense(3)),
        layers.Flatten(),
    ],
    "dropout": lambda: [
        layers.Dropout(0.5),
        layers.GaussianNoise(0.1),
        layers.Flatten(),
    ],
    "conv": lambda: [layers.Conv1D(3, 2), layers.GlobalMaxPooling1D()],
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(clipnorm=1.0, use_ema=True),
    "sgd": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 10), momentum=0.9
    ),
    "accumulating": lambda: keras.optimizers.AdamW(gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.RMSprop(), dynamic_growth_steps=2
    ),
}


@pytest.mark.slow(but=["gru-adam"])
@pytest.mark.parametrize(
    ("model_name", "optimizer_name"),
    [(m, "adam") for m in MODELS] + [("conv", o) for o in OPTIMIZERS],
)
def test_common_training_code_is_accepted(model_name, optimizer_name, strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([*MODELS[model_name](), layers.Dense(2)])
        optimizer = OPTIMIZERS[optimizer_name]()
        metric = keras.metrics.Mean()

    def step(x: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = ops.mean(model(x, training=True) ** 2)
            if optimizer_name == "loss scale":
                loss = optimizer.scale_loss(loss)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        metric.update_state(loss)

    x = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype("float32")
    before = None
    for _ in range(3):
        strategy.run(step, (rx.PerReplica(x),))
        before = before or [np.asarray(v.value) for v in model.trainable_variables]
    assert model.trainable_variables
    for old, new in zip(before, model.trainable_variables, strict=True):
        assert np.any(old != np.asarray(new.value)), new.path
    strategy.check_replicas()


def corrupt(variable: keras.Variable, replica: int) -> None:
    """Change one replica's copy in its lowest bit."""
    variable._value = corrupted(variable.value, replica)


def corrupted(array: jax.Array, replica: int) -> jax.Array:
    """An array whose copy on one replica has another lowest bit."""
    copies = [np.array(s.data) for s in array.addressable_shards]
    flat = copies[replica].reshape(-1).view("uint8")
    flat[0] ^= 1
    return jax.make_array_from_single_device_arrays(
        array.shape,
        array.sharding,
        [
            jax.device_put(c, s.device)
            for c, s in zip(copies, array.addressable_shards, strict=True)
        ],
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_check_replicas_finds_one_changed_bit(dtype) -> None:
    strategy = mirrored(4)
    with strategy.scope():
        same = keras.Variable([1, 2, 3], dtype=dtype, name="same", trainable=False)
        other = keras.Variable([[1, 0]], dtype=dtype, name="other", trainable=False)
    strategy.check_replicas()
    corrupt(other, replica=2)
    with pytest.raises(
        rx.DivergenceError, match=r"copies differ.*'other' on replicas \[2\]\."
    ) as error:
        strategy.check_replicas()
    assert "same" not in str(error.value)
    strategy.check_replicas([same])


def test_corrupted_first_copy_shows_as_all_others(strategy) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        w = keras.Variable(1.0, name="w")
    corrupt(w, replica=0)
    with pytest.raises(rx.DivergenceError, match=r"'w' on replicas \[1, 2\]"):
        strategy.check_replicas()


def test_check_replicas_every_so_many_steps() -> None:
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"], check_replicas_every=3)
    with strategy.scope():
        w = keras.Variable([1.0, 2.0], name="w")

    def step() -> None:
        w.assign(w * 0.5)

    strategy.run(step)
    corrupt(w, replica=1)
    strategy.run(step)
    with pytest.raises(rx.DivergenceError, match=r"'w' on replicas \[1\]"):
        strategy.run(step)


def test_copies_of_arguments_are_checked_every_so_many_steps() -> None:
    strategy = rx.MirroredStrategy(
        ["cpu:0", "cpu:1"], replicas_per_device=2, check_replicas_every=2
    )

    def step(state: Any, rate: Any, key: Any, batch: Any) -> Any:
        return {"w": state["w"] * rate}

    rest = (0.5, jax.random.key(0), rx.PerReplica(np.ones(4)))
    state = strategy.run(step, ({"w": np.ones(3, "float32")}, *rest))
    for _ in range(3):
        state = strategy.run(step, (state, *rest), donate=(0,))
    state = {"w": corrupted(state["w"], 1)}
    state = strategy.run(step, (state, *rest))
    with pytest.raises(
        rx.DivergenceError, match=r"args\[0\]\['w'\] on replicas \[2, 3\]\. "
    ):
        strategy.run(step, (state, *rest), donate=(0,))
    assert not state["w"].is_deleted()


def test_callbacks_can_be_allowed_by_a_reduction(strategy) -> None:
    """A host's answer may differ, so it must be combined like any such value."""

    def fn(x: Any, w: Any) -> Any:
        return total(DIFFERENT["callback"](x, w))

    assert (assigns(fn, strategy) == 2.0).all()


def test_marks_of_a_nest() -> None:
    def fn(a: Any, b: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            c = jax.jit(
                lambda c: lax.cond(c[1].sum() > 0, lambda: (c[0] + 1, c[1]), lambda: c)
            )(c)
            return c, (x, c[1])

        return lax.scan(body, (a, b), jnp.ones(2)), declare_mirrored(b), a

    def marks_with(*specs: P) -> list[int]:
        mesh = Mesh(np.array(jax.devices()[:1]), ("replica",))
        mapped = jax.shard_map(
            fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
        )
        (equation,) = jax.make_jaxpr(mapped)(jnp.ones(1), jnp.ones(1)).eqns
        return result_marks(equation, "replica")[0]

    # Outputs: carry a, carry b, ys x, ys b, declared b, a.
    assert marks_with(P(), P("replica")) == [1, 1, 0, 1, 0, 0]
    assert marks_with(P("replica"), P()) == [1, 0, 0, 0, 0, 1]


def test_gradient_marks_stop_where_gradients_do() -> None:
    def fn(a: Any, b: Any) -> Any:
        return a * lax.stop_gradient(b), jnp.floor(b).astype("int32") + 1, a * b

    jaxpr = jax.make_jaxpr(fn)(1.0, 2.0).jaxpr
    assert gradient_marks(jaxpr, [1, 2])[::2] == [1, 3]
    assert gradient_marks(jaxpr, [1, 2])[1] == 0
