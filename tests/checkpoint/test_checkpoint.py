"""Saving and restoring objects."""

import tempfile
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import replicax as rx
from replicax.checkpoint import Checkpoint, CheckpointError


def small_model(units: int = 3) -> keras.Sequential:
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(units),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )


def trained(units: int = 3, optimizer: str = "adam") -> keras.Sequential:
    model = small_model(units)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(16, 4))
    model.fit(x, x[:, :2], batch_size=8, verbose=0)
    return model


def values(*owners) -> list[np.ndarray]:
    return [np.asarray(v.value) for owner in owners for v in owner.variables]


def assert_equal(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_a_restore_sets_model_optimizer_seeds_and_variables(tmp_path):
    model = trained()
    seeds = keras.random.SeedGenerator(3)
    keras.random.normal((1,), seed=seeds)
    step = keras.Variable(7, dtype="int32", trainable=False)
    path = Checkpoint(
        model=model, optimizer=model.optimizer, seeds=seeds, step=step
    ).save(tmp_path / "ckpt")
    assert path == str(tmp_path / "ckpt-1")

    other = small_model()
    other.compile("adam", "mse")  # Its optimizer is built for the restore.
    other_seeds = keras.random.SeedGenerator(99)
    other_step = keras.Variable(0, dtype="int32", trainable=False)
    checkpoint = Checkpoint(
        model=other, optimizer=other.optimizer, seeds=other_seeds, step=other_step
    )
    checkpoint.restore(path).assert_consumed()
    assert_equal(
        [*values(other, other.optimizer), np.asarray(other_seeds.state.value)],
        [*values(model, model.optimizer), np.asarray(seeds.state.value)],
    )
    assert int(other_step.value) == 7
    assert checkpoint.save_counter == 1


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_a_variable_of_64_bits_is_restored(tmp_path):
    """JAX keeps them in 32 bits."""
    step = keras.Variable(7, dtype="int64", trainable=False)
    path = Checkpoint(step=step).save(tmp_path / "ckpt")
    step.assign(0)
    Checkpoint(step=step).restore(path).assert_consumed()
    assert int(step.value) == 7


def test_a_compiled_model_includes_its_optimizer(tmp_path):
    model = trained()
    path = Checkpoint(model=model).write(tmp_path / "c")
    other = small_model()
    other.compile("adam", "mse")
    Checkpoint(model=other).restore(path).assert_consumed()
    assert_equal(values(other.optimizer), values(model.optimizer))
    bare = small_model()
    status = Checkpoint(model=bare).restore(path)
    assert_equal(values(bare), values(model))
    with pytest.raises(CheckpointError, match="in no object: model/optimizer/"):
        status.assert_consumed()


def test_nothing_is_restored_before_the_first_checkpoint(tmp_path, caplog):
    model = small_model()
    before = values(model)
    checkpoint = Checkpoint(model=model)
    manager = rx.CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    status = checkpoint.restore(manager.latest_checkpoint)
    assert_equal(values(model), before)
    with pytest.raises(CheckpointError, match="checkpoint None does not fit"):
        status.assert_consumed()
    assert not caplog.records


def test_layers_of_equal_names_have_own_entries(tmp_path):
    def model(seed: int) -> keras.Model:
        class Twins(keras.Model):
            def __init__(self):
                super().__init__()
                keras.utils.set_random_seed(seed)
                self.a = keras.layers.Dense(2, name="same")
                self.parts = [keras.layers.Dense(2, name="same") for _ in range(2)]
                self.build((None, 2))

            def build(self, shape):
                for layer in (self.a, *self.parts):
                    layer.build(shape)
                self.built = True

            def call(self, x):
                for layer in (self.a, *self.parts):
                    x = layer(x)
                return x

        return Twins()

    first, second = model(1), model(2)
    path = Checkpoint(net=first).write(tmp_path / "c")
    Checkpoint(net=second).restore(path).assert_consumed()
    assert_equal(values(second), values(first))


@pytest.mark.parametrize("replicas", [1, 2])
def test_restored_variables_stay_mirrored(tmp_path, replicas):
    path = Checkpoint(model=trained()).write(tmp_path / "c")
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        model = small_model()
        model.compile("adam", "mse")
    before = [v.value.sharding for v in model.variables]
    Checkpoint(model=model).restore(path).assert_consumed()
    assert [v.value.sharding for v in model.variables] == before
    assert all(v.value.sharding == before[0] for v in model.optimizer.variables)
    strategy.check_replicas()
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    back = Checkpoint(model=model).write(tmp_path / "d")
    plain = small_model()
    Checkpoint(model=plain).restore(back).expect_partial()
    assert_equal(values(plain), values(model))


def test_loss_scaling_and_averaging_optimizers(tmp_path):
    def optimizer() -> keras.optimizers.Optimizer:
        inner = keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(inner)

    model = trained(optimizer=optimizer())
    path = Checkpoint(model=model).write(tmp_path / "c")
    other = small_model()
    other.compile(optimizer(), "mse")
    Checkpoint(model=other).restore(path).assert_consumed()
    assert_equal(values(other.optimizer), values(model.optimizer))


def test_a_tree_of_values_is_restored(tmp_path):
    key = jax.random.key(5)
    tree = {"a": [np.arange(3, dtype="u4"), jnp.ones((2,), "bfloat16")], "b": (1.5,)}
    path = Checkpoint(
        step=3, name="x", tree=tree, key=key, scalar=np.float64(0.1), data=b"\0\1"
    ).write(tmp_path / "c")
    blank = {"a": [np.zeros(3, "uint32"), jnp.zeros((2,), "bfloat16")], "b": (0.0,)}
    other = Checkpoint(
        step=0,
        name="",
        tree=blank,
        key=jax.random.key(0),
        scalar=np.float64(),
        data=b"",
    )
    other.restore(path).assert_consumed()
    assert (other.step, other.name, other.data) == (3, "x", b"\0\1")
    assert other.tree["b"] == (1.5,)
    assert other.scalar == np.float64(0.1)
    assert isinstance(other.scalar, np.float64)
    assert_equal(other.tree["a"], tree["a"])
    assert jnp.array_equal(jax.random.key_data(other.key), jax.random.key_data(key))


_DTYPES = st.sampled_from(
    [
        *("bool", "int8", "uint8", "int16", "int32", "int64", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64"),
        *("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"),
    ]
)


@settings(
    max_examples=25,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
)
@given(
    entries=st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.tuples(_DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_array_is_restored_bit_by_bit(entries, seed):
    rng = np.random.default_rng(seed)

    def array(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        known = np.dtype(getattr(ml_dtypes, dtype, dtype))
        bits = rng.integers(0, 256, (*shape, known.itemsize), np.uint8)
        if dtype in ("bool", "int4"):
            return (bits[..., 0] % 2).astype(known)
        return np.ascontiguousarray(bits).view(known)[..., 0]

    arrays = {name: array(*entry) for name, entry in entries.items()}
    blank = {name: np.zeros_like(x) for name, x in arrays.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Checkpoint(arrays=arrays).write(Path(folder, "c"))
        other = Checkpoint(arrays=blank)
        other.restore(path).assert_consumed()
    for name, x in arrays.items():
        assert other.arrays[name].dtype == x.dtype
        assert other.arrays[name].shape == x.shape
        assert other.arrays[name].tobytes() == x.tobytes()


def test_a_grain_iterator_continues(tmp_path):
    data = grain.MapDataset.range(20).shuffle(seed=1).batch(3)
    iterator = iter(data.to_iter_dataset())
    for _ in range(2):
        next(iterator)
    path = Checkpoint(data=iterator).write(tmp_path / "c")
    rest = [x.tolist() for x in iterator]
    again = iter(data.to_iter_dataset())
    Checkpoint(data=again).restore(path).assert_consumed()
    assert [x.tolist() for x in again] == rest


def test_objects_with_a_state_dict(tmp_path):
    class Sampler:
        def __init__(self):
            self.state = {"epoch": 0}

        def state_dict(self):
            return dict(self.state)

        def load_state_dict(self, state):
            self.state = state

    sampler, other = Sampler(), Sampler()
    sampler.state = {"epoch": 2, "order": np.arange(3), 4: (None, b"x")}
    path = Checkpoint(sampler=sampler).write(tmp_path / "c")
    Checkpoint(sampler=other).restore(path).assert_consumed()
    np.testing.assert_array_equal(other.state.pop("order"), np.arange(3))
    assert other.state == {"epoch": 2, 4: (None, b"x")}


def test_contents_are_copies(tmp_path):
    # A step donates the variables' arrays.
    model = trained()
    expected = values(model)
    contents = Checkpoint(model=model).contents()
    model.fit(np.ones((16, 4)), np.ones((16, 2)), verbose=0)
    assert contents is not None
    model_arrays = [
        x.read() for name, x in contents.arrays.items() if "/optimizer/" not in name
    ]
    assert sorted(x.tobytes() for x in model_arrays) == sorted(
        x.tobytes() for x in expected
    )


def test_the_status_lists_names_of_one_side(tmp_path, caplog):
    path = Checkpoint(a=np.ones(2), b=1).write(tmp_path / "c")
    checkpoint = Checkpoint(a=np.zeros(2), c=np.zeros(1))
    status = checkpoint.restore(path)
    assert checkpoint.a.tolist() == [1, 1]
    with pytest.raises(
        CheckpointError, match=r"not in the checkpoint: c; in the .* in no object: b\."
    ):
        status.assert_consumed()
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: c\."):
        status.assert_existing_objects_matched()
    Checkpoint(a=np.zeros(2)).restore(path).assert_existing_objects_matched()
    Checkpoint(a=np.zeros(2)).restore(path).expect_partial()
    assert not caplog.records
    Checkpoint(a=np.zeros(2)).restore(path)
    assert "in no object: b" in caplog.text


def test_the_error_lists_all_mismatches_and_nothing_is_restored(tmp_path):
    path = Checkpoint(model=small_model(3), n=1, x=np.ones(2)).write(tmp_path / "c")
    other = small_model(5)
    before = values(other)
    checkpoint = Checkpoint(model=other, n=np.zeros(1), x=np.ones(2, "float16"), y=0)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(path)
    message = str(caught.value)
    assert "model/dense/kernel" in message
    assert "float32[4, 3] saved, float32[4, 5] here" in message
    assert "n: a plain value saved, float64[1] here" in message
    assert "float64[2] saved, float16[2] here" in message
    assert "not in the checkpoint: y" in message
    assert_equal(values(other), before)


def test_unbuilt_models_and_optimizers_are_restored_when_built(tmp_path):
    model = trained()
    path = Checkpoint(model=model).write(tmp_path / "c")
    layers = small_model().layers
    later = keras.Sequential([type(x).from_config(x.get_config()) for x in layers])
    later.compile(keras.optimizers.Adam(), "mse")
    assert not later.built
    status = Checkpoint(model=later).restore(path)
    with pytest.raises(CheckpointError, match=r"not built yet.*: model"):
        status.assert_consumed()
    later(np.zeros((1, 4), "float32"))
    status.assert_consumed()
    assert_equal(values(later), values(model))
    assert later.optimizer.iterations == model.optimizer.iterations > 0


def test_objects_that_a_step_builds_are_restored_in_it(tmp_path):
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    x = np.ones((4, 4), "float32")

    def objects(width=3):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(width)])
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        return Checkpoint(model=model, optimizer=optimizer)

    def losses(made):
        def step(x):
            with rx.GradientTape() as tape:
                loss = keras.ops.mean(made.model(x) ** 2)
            weights = made.model.trainable_variables
            made.optimizer.apply_gradients(
                zip(tape.gradient(loss, weights), weights, strict=True)
            )
            return loss

        return [float(strategy.run(step, args=(x,))) for _ in range(2)]

    first, late, wide = objects(), objects(), objects(width=5)
    losses(first)
    path = first.write(tmp_path / "c")
    late.restore(path)
    assert losses(late) == pytest.approx(losses(first), rel=1e-6)
    assert int(late.optimizer.iterations.value) == 4
    assert_equal(
        values(late.model, late.optimizer), values(first.model, first.optimizer)
    )
    wide.restore(path)
    with pytest.raises(CheckpointError, match=r"float32\[4, 3\] saved"):
        losses(wide)


@pytest.mark.parametrize("kind", [rx.MirroredStrategy, rx.FullyShardedStrategy])
def test_fit_builds_and_restores_a_model_with_its_optimizer(tmp_path, kind):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.Dense(8), keras.layers.Dense(1)]

        def call(self, x):
            return self.parts[1](self.parts[0](x))

    def compiled():
        with kind(jax.devices()[:2]).scope():
            model = Net()
            model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    x = np.linspace(-1, 1, 32).reshape(8, 4)
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model, other = compiled(), compiled()
    model.fit(x, x[:, :1], **options)
    path = Checkpoint(models=[model], adam=model.optimizer).write(tmp_path / "c")
    status = Checkpoint(models=[other], adam=other.optimizer).restore(path)
    for trained_on in (model, other):
        trained_on.fit(x, x[:, :1], **options)
    status.assert_consumed()
    assert_equal(values(other, other.optimizer), values(model, model.optimizer))


def test_wrong_objects_and_names():
    with pytest.raises(TypeError, match="x/y is a object, which cannot be saved"):
        Checkpoint(x={"y": object()})
    with pytest.raises(ValueError, match="'save'"):
        Checkpoint(save=1)
    with pytest.raises(ValueError, match=r"name .w/a/b.*Rename one"):
        Checkpoint(w={"a/b": np.zeros(2), "a": {"b": np.ones(2)}})


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros(3, [("x", "i4"), ("y", "f4")]), r"x is an array of dtype \[\('x'"),
        (np.array(["a", None], object), "x is an array of dtype object"),
        (np.ma.masked_array([1, 2], [0, 1]), "x is a masked array"),
    ],
)
def test_arrays_that_are_more_than_numbers_are_refused(array, problem):
    with pytest.raises(TypeError, match=problem):
        Checkpoint(x=array)


def test_an_array_of_rank_0_replaces_only_a_number(tmp_path: Path) -> None:
    path = rx.Checkpoint(state={"a": np.float32(1.5)}).save(tmp_path / "saved")
    number = rx.Checkpoint(state={"a": 3})
    number.restore(path)
    assert number.state == {"a": 1.5}
    text = rx.Checkpoint(state={"a": "text"})
    with pytest.raises(rx.CheckpointError, match=r"state/a.*float32\[\] saved"):
        text.restore(path)
    assert text.state == {"a": "text"}
