"""How often programs are compiled, and how often they are called."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import monitoring
from keras import layers

from replicax.keras.steps import steps_of


def classifier(steps_per_execution=1):
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(12, activation="relu"),
            layers.Dropout(0.1),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(epsilon=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    return model


# 16 examples a batch: 7 batches; 6 batches and one of 5 examples.
@pytest.mark.slow(but=["101"])
@pytest.mark.parametrize("num_examples", [112, 101])
def test_steps_per_execution_changes_nothing(
    digits, outcome, assert_same, num_examples
):
    x, y = (a[:num_examples] for a in digits)

    def work(steps_per_execution):
        model = classifier(steps_per_execution)
        history = model.fit(x, y, 16, epochs=2, shuffle=False, verbose=0)
        scores = model.evaluate(x, y, 16, verbose=0)
        predictions = model.predict(x, 16, verbose=0)
        assert len(predictions) == num_examples
        return model.get_weights(), history.history, scores, predictions

    expected = outcome(lambda: work(1), 4)
    # The same sums in the same order; XLA may fuse a loop's body in another way.
    assert_same(outcome(lambda: work(3), 4), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("num_examples", "calls"),
    [(96, 2), (112, 2 + 1), (101, 2 + 1)],
    ids=["multiple", "one more", "ragged"],
)
def test_one_dispatch_for_several_batches(digits, strategy_of, num_examples, calls):
    x, y = (a[:num_examples] for a in digits)
    strategy = strategy_of(4)
    with strategy.scope():
        model = classifier(steps_per_execution=3)
    for use in (
        lambda: model.fit(x, y, batch_size=16, verbose=0),
        lambda: model.evaluate(x, y, batch_size=16, verbose=0),
        lambda: model.predict(x, batch_size=16, verbose=0),
    ):
        before = strategy.runner._num_steps
        use()
        assert strategy.runner._num_steps - before == calls


def test_batches_that_differ_in_an_execution(digits, outcome, assert_same):
    """They cannot be one loop, and run one after another."""
    x, y = (a[:40] for a in digits)

    def work(steps_per_execution):
        model = classifier(steps_per_execution)
        batches = [(x[a:b], y[a:b]) for a, b in [(0, 16), (16, 24), (24, 40), (36, 40)]]
        generator = (batch for batch in batches)
        model.fit(generator, steps_per_epoch=4, shuffle=False, verbose=0)
        return model.get_weights()

    expected = outcome(lambda: work(1), 4)
    assert_same(outcome(lambda: work(2), 4), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("array_of", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_an_execution_has_the_rows_that_keras_would_take(
    digits, outcome, assert_same, shuffle, array_of
):
    """Cut out of the arrays together: 16 batches of 6 rows in fives, and one of 5."""
    x, y = (array_of(a[:101]) for a in digits)
    halves = {"left": x[:, :32], "right": x[:, 32:]}

    def work(steps_per_execution):
        inputs = {name: keras.Input((32,), name=name) for name in halves}
        joined = layers.Concatenate()(list(inputs.values()))
        model = keras.Model(inputs, layers.Dense(10)(joined))
        model.compile(
            keras.optimizers.SGD(0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
        )
        weights = array_of(np.linspace(0.5, 2, 101, dtype="float32"))
        model.fit(
            halves, y, 6, epochs=2, sample_weight=weights, shuffle=shuffle, verbose=0
        )
        return model.get_weights()

    assert_same(outcome(lambda: work(5), 2), outcome(lambda: work(1), 0))


class Compilations:
    """Counts the programs that JAX compiles."""

    def __init__(self):
        self.count = 0

    def __call__(self, event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


@pytest.fixture
def compilations():
    listener = Compilations()
    monitoring.register_event_duration_secs_listener(listener)
    yield listener
    monitoring.unregister_event_duration_listener(listener)


def programs_of(model, kind):
    steps = steps_of(model, model._replicax_strategy, kind)
    return list(steps.programs)


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_nothing_compiles_twice(digits, strategy_of, compilations, steps_per_execution):
    x, y = (a[:70] for a in digits)
    with strategy_of(8).scope():
        model = classifier(steps_per_execution)

    def use(epochs):
        model.fit(x, y, 16, epochs=epochs, validation_data=(x, y), verbose=0)
        model.predict(x, batch_size=16, verbose=0)

    use(epochs=3)
    for name in ("train", "test", "predict"):
        programs = programs_of(model, name)
        # One for whole batches, one for the last: it has 6 examples.
        assert [p._jitted._cache_size() for p in programs] == [1, 1], name
    assert compilations.count > 0
    compilations.count = 0
    use(epochs=3)
    assert compilations.count == 0


def test_loaded_weights_compile_nothing(digits, strategy_of, compilations):
    """Assigned values keep their sharding."""
    x, y = (a[:32] for a in digits)
    with strategy_of(2).scope():
        model = classifier()
    model.fit(x, y, 16, epochs=2, verbose=0)
    model.set_weights(model.get_weights())
    model.optimizer.learning_rate = 0.01
    compilations.count = 0
    model.fit(x, y, 16, epochs=2, verbose=0)
    assert [p._jitted._cache_size() for p in programs_of(model, "train")] == [1]
