"""States of tiny models, as one array between steps."""

import functools

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.conftest import mirrored

import replicax as rx
from replicax import raveling
from replicax.raveling import RaveledValues, Raveling

DTYPES = ["float32", "int32", "uint32", "bool", "bfloat16"]


def on_two() -> NamedSharding:
    return NamedSharding(Mesh(jax.devices()[:2], ("replica",)), PartitionSpec())


def raveling_of(values) -> Raveling:
    shapes = tuple(np.shape(x) for x in values)
    found = Raveling.of(shapes, tuple(np.dtype(x.dtype) for x in values), on_two())
    assert found is not None
    return found


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES)
        ),
        min_size=1,
        max_size=8,
    )
)
def test_values_return_as_they_were(kinds) -> None:
    rng = np.random.default_rng(0)
    # One more than dtypes, or nothing is gained.
    kinds = [*kinds, *(((2,), dtype) for _, dtype in kinds)]
    values = [rng.integers(0, 2, shape).astype(dtype) for shape, dtype in kinds]
    found = raveling_of(values)
    together = found.of_values(values)
    assert len(together) == len(values)
    assert len(together.arrays) == len({dtype for _, dtype in kinds})
    again = RaveledValues(found, jax.jit(found.ravel)(list(together)))
    for value, one, other in zip(values, together, again, strict=True):
        assert one.dtype == value.dtype
        np.testing.assert_array_equal(one, value, strict=True)
        np.testing.assert_array_equal(other, value, strict=True)
    assert [x.shape for x in together[1:3]] == [x.shape for x in values[1:3]]


def test_what_stays_one_by_one() -> None:
    f4 = np.dtype("float32")
    most = raveling.MOST_BYTES // 4
    assert Raveling.of(((most - 1,), ()), (f4, f4), on_two()) is not None
    assert Raveling.of(((most,), ()), (f4, f4), on_two()) is None
    assert Raveling.of(((4,), ()), (f4, np.dtype("int32")), on_two()) is None
    assert Raveling.of((), (), on_two()) is None


def test_copies_that_differ_stay_different() -> None:
    where = on_two()
    copies = [
        jax.device_put(np.float32([i, 1]), d) for i, d in enumerate(jax.devices()[:2])
    ]
    x = jax.make_array_from_single_device_arrays((2,), where, copies)
    values = [x, np.float32([3])]
    together = raveling_of(values).of_values(values)
    for value in together.arrays[0], together[0]:
        assert [s.data[0] for s in value.addressable_shards] == [0, 1]


def model_of(strategy, **kwargs) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **kwargs,
        )
    return model


class Watch(keras.callbacks.Callback):
    """Looks at the state after each step, or only at what it lies in."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.kinds: set[bool] = set()
        self.sums: list[float] = []

    def on_train_batch_end(self, batch, logs=None) -> None:
        # Keras keeps it between steps; the model's own variables are behind.
        state = self.model._jax_state["trainable_variables"]
        self.kinds.add(isinstance(getattr(state, "_everything", None), RaveledValues))
        if self.reads:
            self.sums.append(sum(float(np.sum(w)) for w in self.model.get_weights()))


@pytest.mark.parametrize(("num_replicas", "steps"), [(1, 3), (2, 1)])
def test_fit_is_what_it_is_without(digits, monkeypatch, num_replicas, steps) -> None:
    """Sizes that do not divide, random numbers, and several programs of one state.

    To the bit: the same operations on the same numbers. XLA may merge others, which
    changes no product or sum here.
    """
    x, y = digits[0][:203], digits[1][:203]

    def run(watch):
        model = model_of(mirrored(num_replicas), steps_per_execution=steps)
        history = model.fit(
            x,
            y,
            batch_size=16,
            epochs=2,
            validation_data=(x[:51], y[:51]),
            callbacks=[watch],
            verbose=0,
        )
        return model, history.history

    model, history = run(watch := Watch(reads=False))
    assert watch.kinds == {True}
    with monkeypatch.context() as patch:
        patch.setattr(Raveling, "of", lambda *_: None)
        plain, plain_history = run(watch := Watch(reads=False))
        assert watch.kinds == {False}
    read, read_history = run(watch := Watch(reads=True))
    assert watch.kinds == {True}
    assert len(set(watch.sums)) == len(watch.sums)
    for other, other_history in [(plain, plain_history), (read, read_history)]:
        for name, numbers in history.items():
            np.testing.assert_allclose(numbers, other_history[name], rtol=1e-6)
        for ours, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_model_goes_on_after_another_function(digits) -> None:
    """`fit`, one batch by hand, `evaluate` and `fit` again, all on one state."""
    x, y = digits[0][:96], digits[1][:96]
    run = functools.partial(dict, batch_size=32, shuffle=False, verbose=0)

    def after(strategy) -> list[np.ndarray]:
        model = model_of(strategy)
        model.layers[-2].rate = 0.0
        model.fit(x, y, **run())
        model.train_on_batch(x[:32], y[:32])
        model.evaluate(x, y, verbose=0)
        model.fit(x, y, **run(epochs=2))
        assert int(model.optimizer.iterations.value) == 10
        return model.get_weights()

    for one, two in zip(
        after(rx.OneDeviceStrategy("cpu:0")), after(mirrored(1)), strict=True
    ):
        np.testing.assert_array_equal(one, two)


def test_a_large_model_is_passed_one_by_one(digits) -> None:
    x, y = digits[0][:32], digits[1][:32]
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(400)])
        model.compile("sgd", "mse")
    model.fit(x, np.tile(y[:, None], 400), callbacks=[watch := Watch(False)], verbose=0)
    assert watch.kinds == {False}
