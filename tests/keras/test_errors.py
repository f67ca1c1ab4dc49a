"""Errors and warnings about wrong scopes, parts of models and arguments."""

import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx


def classifier(*hidden, **compile_args):
    model = keras.Sequential(
        [keras.Input((64,)), *hidden, layers.Dense(10, name="out")]
    )
    args = {"optimizer": "sgd", **compile_args}
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), **args
    )
    return model


@pytest.fixture
def data(digits):
    return tuple(a[:32] for a in digits)


def test_a_forgotten_scope_is_logged_once(data, strategy_of, caplog):
    model = classifier()
    strategy = strategy_of(2)
    for _ in range(2):
        model.fit(*data, verbose=0)
    (record,) = caplog.records
    assert f"outside the scope of {strategy!r}" in record.message
    assert "with strategy.scope()" in record.message


def test_a_model_beside_a_strategy_that_is_used(data, strategy_of, caplog):
    strategy = strategy_of(2)
    with strategy.scope():
        classifier()
    classifier().fit(*data, verbose=0)
    one = strategy_of(1)
    classifier().fit(*data, verbose=0)
    del one
    assert not caplog.records


USES = [
    lambda model, x, y: model.fit(x, y, verbose=0),
    lambda model, x, y: model.evaluate(x, y, verbose=0),
    lambda model, x, y: model.predict(x, verbose=0),
    lambda model, x, y: model.train_on_batch(x, y),
]


@pytest.mark.parametrize("use", USES)
def test_model_from_outside(data, strategy_of, use):
    model = classifier()
    with (
        strategy_of(2).scope(),
        pytest.raises(rx.ContextError, match=rf"{model.name}.* made outside the scope"),
    ):
        use(model, *data)
    use(model, *data)  # On one device, as before.


@pytest.mark.parametrize("use", USES)
def test_model_of_another_strategy(data, strategy_of, use):
    """As when only the notebook's cell that makes the strategy is run again."""
    with strategy_of(2).scope():
        model = classifier()
    message = rf"{model.name}.* of MirroredStrategy\(.*3\).* MirroredStrategy\(.*1\)"
    with strategy_of(4).scope(), pytest.raises(rx.ContextError, match=message):
        use(model, *data)
    use(model, *data)


def test_compile_under_another_scope(strategy_of):
    with strategy_of(2).scope():
        model = classifier()
    with strategy_of(4).scope(), pytest.raises(rx.ContextError, match="scope of"):
        model.compile("sgd", "mse")


def test_parts_from_outside(data, strategy_of):
    layer = layers.Dense(12, name="early_layer")
    layer.build((None, 64))
    metric = keras.metrics.SparseCategoricalAccuracy(name="early_metric")
    optimizer = keras.optimizers.SGD(name="early_optimizer")
    with strategy_of(2).scope():
        models = {
            "early_layer/kernel": classifier(layer),
            "early_metric/total": classifier(metrics=[metric]),
            "early_optimizer/iteration": classifier(optimizer=optimizer),
        }
    for path, model in models.items():
        with pytest.raises(rx.ContextError, match=rf"'{path}'.*outside the scope"):
            model.fit(*data, verbose=0)


def test_layer_of_another_strategy(data, strategy_of):
    with strategy_of(2).scope():
        layer = layers.Dense(12, name="of_two")
        layer.build((None, 64))
    with strategy_of(4).scope():
        model = classifier(layer)
    with pytest.raises(rx.ContextError, match=r"of_two/kernel.*another strategy"):
        model.fit(*data, verbose=0)


def test_compile_outside_the_scope(data, strategy_of):
    """The model knows its strategy; what compile makes is mirrored too."""
    strategy = strategy_of(4)
    with strategy.scope():
        model = classifier()
    model.compile("adam", model.loss, metrics=["accuracy"])
    history = model.fit(*data, verbose=0).history
    assert set(history) == {"accuracy", "loss"}
    strategy.check_replicas()


def test_scalars_in_a_batch(data, strategy_of):
    x, y = data
    with strategy_of(2).scope():
        model = classifier()
    with pytest.raises(ValueError, match=r"train_on_batch: leaf .* is a scalar"):
        model.train_on_batch(x, y, sample_weight=np.float32(1))


def test_an_error_in_a_step_leaves_the_model_usable(data, strategy_of):
    class Picky(layers.Layer):
        strict = False

        def call(self, x):
            if self.strict:
                raise ValueError("this layer is strict")
            return x

    picky = Picky()
    with strategy_of(2).scope():
        model = classifier(picky)
    model.fit(*data, verbose=0)
    weights = model.get_weights()
    picky.strict = True
    x, y = data
    with pytest.raises(ValueError, match="this layer is strict"):
        model.fit(x[:6], y[:6], verbose=0)  # Another shape: traced anew.
    picky.strict = False
    assert not rx.has_strategy()
    with strategy_of(2).scope():
        pass
    assert np.isfinite(weights[0]).all()


def test_stateful_rnn(strategy_of):
    with strategy_of(2).scope():
        rows = keras.Input(batch_shape=(4, 3, 2))
        state = keras.layers.Bidirectional(keras.layers.GRU(2, stateful=True))(rows)
        model = keras.Model(rows, state)
        model.compile("sgd", "mse")
    x, y = np.zeros((4, 3, 2)), np.zeros((4, 4))
    match = r"fit: layer '\w+_gru\w*' of model .* has stateful=True"
    with pytest.raises(NotImplementedError, match=match):
        model.fit(x, y, batch_size=4, verbose=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, x, y: model.fit(None), "fit: x must be arrays.*got None"),
        (lambda model, x, y: model.predict(None), "predict: x must be arrays.*None"),
        (lambda model, x, y: model.fit(x, y, steps_per_epoch=-1), "fit: got -1 steps"),
        (lambda model, x, y: model.predict(x, steps=-2), "predict: got -2 steps"),
    ],
)
def test_arguments_of_the_data(data, strategy_of, call, message):
    with strategy_of(2).scope():
        model = classifier()
    with pytest.raises(ValueError, match=message):
        call(model, *data)


def test_variables_made_in_a_replica_function(strategy_of):
    strategy = strategy_of(2)
    with pytest.raises(rx.ContextError, match="'mine' is created inside the function"):
        strategy.run(lambda: keras.Variable(1.0, name="mine") + 1)
    with pytest.raises(rx.ContextError, match=r"run: a variable.*optimizers outside"):
        strategy.run(lambda: keras.optimizers.Adam().learning_rate + 0)


def _distributed(strategy, data):
    return strategy.experimental_distribute_dataset(data, batch_size=16)


def test_batch_size_of_a_distributed_dataset(data, strategy_of, caplog):
    strategy = strategy_of(2)
    with strategy.scope():
        model = classifier()
    dataset = _distributed(strategy, data)
    # `batch_size` is that of the arrays, so there is no warning.
    model.fit(*data, batch_size=8, validation_data=dataset, verbose=0)
    assert "batch_size" not in caplog.text
    model.fit(*data, validation_batch_size=8, validation_data=dataset, verbose=0)
    assert "fit, validation_data: batch_size=8 is ignored" in caplog.text
    model.fit(dataset, batch_size=8, verbose=0)
    assert "fit: batch_size=8 is ignored" in caplog.text
