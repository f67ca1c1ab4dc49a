"""Every kind of training under every strategy gives what mirrored variables give.

The table is cases times strategies. The oracle of a case is `MirroredStrategy` with the
same number of replicas, whose results are compared with those of one device where a
case has no random layer and no statistics of a replica's rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers
from tests.strategies.parity import (
    BATCH_SIZE,
    NUM_FEATURES,
    NUM_UNITS,
    StatelessStep,
    TapeStep,
    assert_same,
    batches,
    compiled,
    data,
    fitted,
    functional_step,
    looped,
    network,
    state,
    tape_step,
)

import replicax as rx

# Two whole batches, and one of 9 rows, which three replicas can share.
UNEVEN = 2 * BATCH_SIZE + 9


def devices(number: int) -> list[str]:
    return [f"cpu:{i}" for i in range(number)]


def mirrored(number: int, **options: Any) -> rx.MirroredStrategy:
    return rx.MirroredStrategy(devices(number), **options)


STRATEGIES: dict[str, tuple[int, Callable[[], rx.Strategy]]] = {
    "shard_update": (4, lambda: mirrored(4, shard_update=True)),
    "fully sharded": (2, lambda: rx.FullyShardedStrategy(devices(2))),
    "model parallel": (
        2,
        lambda: rx.ModelParallelStrategy(None, 2, devices=devices(4)),
    ),
    "central, on a replica": (
        2,
        lambda: rx.CentralStorageStrategy(devices(2), "cpu:1"),
    ),
    "central, elsewhere": (2, lambda: rx.CentralStorageStrategy(devices(2), "cpu:5")),
    "central, one replica": (1, lambda: rx.CentralStorageStrategy(["cpu:3"])),
    "4 on each of 2": (8, lambda: mirrored(2, replicas_per_device=4)),
    "8 on one": (8, lambda: mirrored(1, replicas_per_device=8)),
    "one worker": (8, rx.MultiWorkerMirroredStrategy),
    "hierarchical": (
        4,
        lambda: mirrored(4, cross_device_ops=rx.HierarchicalCopyAllReduce(2)),
    ),
}
"""The number of replicas, and the strategy."""

Case = Callable[[rx.Strategy], Any]


# Models and layers.


def of_class(kind: type[keras.Sequential]) -> Any:
    return kind(
        [keras.Input((NUM_FEATURES,)), layers.Dense(NUM_UNITS), layers.Dense(10)]
    )


class Attention(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(4, 8)
        self.norm = layers.LayerNormalization()

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        self.norm.build(shape)

    def call(self, x: Any) -> Any:
        return self.norm(x + self.attention(x, x))


def with_statistics() -> Any:
    """Random masks, and statistics of a replica's rows and of all rows."""
    return network(
        # A bias, scale or shift here would have rounding alone for its gradient.
        layers.Dense(16, use_bias=False),
        layers.BatchNormalization(center=False, scale=False),
        layers.BatchNormalization(synchronized=True),
        layers.Activation("relu"),
        layers.Dropout(0.3),
    )


LAYERS: dict[str, Callable[[], Any]] = {
    "convolutions": lambda: network(
        layers.Reshape((4, 4, 3)),
        layers.Conv2D(8, 3, padding="same", strides=2),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.Conv2DTranspose(2, 2),
        layers.GroupNormalization(2),
        layers.Flatten(),
    ),
    "recurrent": lambda: network(
        layers.Reshape((6, 8)),
        layers.Bidirectional(layers.GRU(3, return_sequences=True)),
        layers.LSTM(16),
    ),
    "frozen": lambda: network(
        layers.Dense(NUM_UNITS, trainable=False), layers.Dense(NUM_UNITS, "relu")
    ),
    "attention": lambda: network(
        layers.Reshape((3, 16)), layers.Dense(32), Attention(), layers.Flatten()
    ),
    "embedding": lambda: network(
        layers.Lambda(lambda x: ops.cast(ops.clip(3 * x + 9, 0, 19), "int32")),
        layers.Embedding(20, 8),
        layers.GlobalAveragePooling1D(),
    ),
}


# Optimizers.


class Halved(optimizers.SGD):
    """Halves all gradients."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply([g / 2 for g in grads], trainable_variables)


class Clipped(optimizers.Adam):
    """Clips gradients by its own norm; its arguments have other names."""

    def apply(self, gradients: Any, *args: Any, **kwargs: Any) -> None:
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        factor = ops.minimum(1.0, 0.05 / norm)
        super().apply([g * factor for g in gradients], *args, **kwargs)


class Lookahead(optimizers.Optimizer):
    """Pulls the weights of another optimizer back to slow ones."""

    def __init__(self, inner: Any) -> None:
        super().__init__(learning_rate=0.0)
        self.inner = inner

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.inner.build(variables)
            self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]

    @property
    def variables(self) -> Any:
        return [*super().variables, *self.inner.variables]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        weights = trainable_variables or self._trainable_variables
        self.inner.apply(grads, weights)
        for weight, slow in zip(weights, self.slow, strict=True):
            slow.assign(slow + 0.5 * (ops.convert_to_tensor(weight) - slow))
        self.iterations.assign_add(1)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum, schedule": lambda: optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), 0.9, nesterov=True
    ),
    "clipnorm": lambda: optimizers.SGD(0.5, clipnorm=0.05),
    "clipvalue": lambda: optimizers.SGD(0.5, clipvalue=0.005),
    "clipped, averaged": lambda: optimizers.AdamW(
        1e-2,
        weight_decay=0.01,
        epsilon=1e-3,  # Else noise in gradients near zero becomes full steps.
        global_clipnorm=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    ),
    "accumulated": lambda: optimizers.SGD(0.1, 0.9, gradient_accumulation_steps=3),
    "scaled": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1, 0.9), initial_scale=1024.0, dynamic_growth_steps=2
    ),
    "own apply, halved": lambda: Halved(0.1, momentum=0.9),
    "own apply, clipped": lambda: Clipped(0.01),
    "own apply, lookahead": lambda: Lookahead(optimizers.SGD(0.1)),
}


def overflowing() -> Any:
    """Inputs that overflow float32 in the second batch, on one replica."""
    x, y = data()
    x[BATCH_SIZE + 1] = 1e38
    return x, y


# Cases.


def every_entry_point(strategy: rx.Strategy) -> Any:
    x, y = data(UNEVEN)
    weights = np.linspace(0.5, 1.5, len(x), dtype="float32")
    decay = keras.callbacks.LearningRateScheduler(lambda i: 0.01 / (i + 1))
    model, result = fitted(
        strategy,
        lambda: compiled(with_statistics(), metrics=["accuracy"]),
        (x, y),
        epochs=2,
        shuffle=True,
        sample_weight=weights,
        validation_data=(x[:33], y[:33]),
        validation_batch_size=33,
        callbacks=[decay],
    )
    # Replicas cannot share a batch of 33 or of 41 equally.
    return (
        result,
        model.evaluate(x, y, batch_size=33, verbose=0),
        model.predict(x[:41], batch_size=16, verbose=0),
        model.train_on_batch(x[:32], y[:32], weights[:32]),
        model.test_on_batch(x[:33], y[:33]),
        model.predict_on_batch(x[:33]),
        state(model),
    )


def distributed_dataset(strategy: rx.Strategy) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = compiled(network(), metrics=["accuracy"])
    dataset = strategy.experimental_distribute_dataset(
        data(UNEVEN), batch_size=BATCH_SIZE
    )
    history = model.fit(dataset, epochs=2, verbose=0)
    results = model.evaluate(dataset, verbose=0), model.predict(dataset, verbose=0)
    return state(model), history.history, results


def several_steps(strategy: rx.Strategy) -> Any:
    def make() -> Any:
        hidden = (layers.Dense(16, "relu"), layers.Dropout(0.3))
        return compiled(network(*hidden), "sgd", steps_per_execution=2)

    model, result = fitted(strategy, make, data(UNEVEN))
    # An execution of two batches, and one of half a batch.
    return result, model.predict(data(40)[0], batch_size=16, verbose=0)


def loop_with_metrics(strategy: rx.Strategy) -> Any:
    """Losses, metrics, `reduce`, `gather` and local results, over uneven batches."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = network()
        optimizer = optimizers.SGD(0.1, momentum=0.9)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        mean_loss = keras.metrics.Mean()
    example_loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def step(x: Any, y: Any) -> Any:
        with rx.GradientTape() as tape:
            logits = model(x, training=True)
            losses = example_loss(y, logits)
            loss = rx.compute_average_loss(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        mean_loss.update_state(losses)
        return loss, losses, logits

    results: dict[str, list[Any]] = {}
    for batch in strategy.experimental_distribute_dataset(
        data(UNEVEN), batch_size=BATCH_SIZE
    ):
        loss, losses, logits = strategy.run(step, args=batch)
        for name, value in {
            "loss": strategy.reduce("sum", loss),
            "sum": strategy.reduce("sum", losses, axis=0),
            "mean": strategy.reduce("mean", losses, axis=0),
            "logits": strategy.gather(logits, axis=0),
            "rows": np.concatenate(strategy.experimental_local_results(losses)),
        }.items():
            results.setdefault(name, []).append(np.asarray(value))
    strategy.check_replicas()
    metrics = [np.asarray(m.result()) for m in (accuracy, mean_loss)]
    return results, metrics, state(model, optimizer)


def built_in_the_loop(strategy: rx.Strategy) -> Any:
    """Model and optimizer get their variables in the first step."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(10)])
        optimizer = optimizers.Adam(0.01)
    step = tape_step(model, optimizer)
    for batch in batches(strategy):
        strategy.run(step, batch)
    return state(model, optimizer)


def two_optimizers(strategy: rx.Strategy) -> Any:
    """The generator and the critic of a GAN, trained in one step."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        generator = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(3)])
        critic = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(1)])
        g_optimizer, c_optimizer = optimizers.Adam(0.01), optimizers.SGD(0.1, 0.9)

    def step(noise: Any, real: Any) -> None:
        with rx.GradientTape() as g_tape, rx.GradientTape() as c_tape:
            fake = generator(noise)
            on_fake, on_real = critic(fake), critic(real)
            g_loss = rx.compute_average_loss(ops.softplus(-on_fake[:, 0]))
            c_loss = rx.compute_average_loss(
                ops.softplus(on_fake[:, 0]) + ops.softplus(-on_real[:, 0])
            )
        g_weights, c_weights = generator.trainable_weights, critic.trainable_weights
        g_grads = g_tape.gradient(g_loss, g_weights)
        c_grads = c_tape.gradient(c_loss, c_weights)
        g_optimizer.apply(g_grads, g_weights)
        c_optimizer.apply(c_grads, c_weights)

    rng = np.random.default_rng(0)
    xy = [rng.normal(size=(24, n)).astype("float32") for n in (4, 3)]
    for batch in strategy.experimental_distribute_dataset(tuple(xy), batch_size=8):
        strategy.run(step, batch)
    return state(generator, g_optimizer), state(critic, c_optimizer)


def fit_of(make: Callable[[], Any], xy: Callable[[], Any] = data) -> Case:
    return lambda strategy: fitted(strategy, make, xy(), epochs=2)[1]


def loop_of(make_optimizer: Callable[[], Any], make_step: Any) -> Case:
    def run(strategy: rx.Strategy) -> Any:
        result = looped(strategy, make_optimizer, make_step)
        outputs = [strategy.reduce("sum", x) for x in result.pop("outputs")]
        return result, outputs

    return run


def by_optimizer(make: Callable[[], Any]) -> Any:
    return compiled(network(), make())


def adam() -> Any:
    return optimizers.Adam(0.01)


PER_REPLICA: dict[str, Case] = {
    "every entry point": every_entry_point,
    "several steps": several_steps,
}
"""Cases with random masks or statistics of each replica's own."""

SAME_ON_ONE: dict[str, Case] = {
    "distributed dataset": distributed_dataset,
    "loop, metrics": loop_with_metrics,
    "loop, built in it": built_in_the_loop,
    "loop, two optimizers": two_optimizers,
    "loop, tape": loop_of(adam, tape_step),
    "loop, function": loop_of(adam, functional_step),
    "loop, own apply": loop_of(OPTIMIZERS["own apply, clipped"], tape_step),
    "step, tape": fit_of(lambda: compiled(of_class(TapeStep))),
    "step, stateless": fit_of(lambda: compiled(of_class(StatelessStep))),
    **{
        f"layers, {name}": fit_of(
            functools.partial(
                lambda make: compiled(make(), optimizers.SGD(0.1, 0.9)), x
            )
        )
        for name, x in LAYERS.items()
    },
    **{
        f"optimizer, {name}": fit_of(
            functools.partial(by_optimizer, make),
            overflowing if name == "scaled" else data,
        )
        for name, make in OPTIMIZERS.items()
    },
}
"""Cases whose results do not depend on the number of replicas."""

CASES = PER_REPLICA | SAME_ON_ONE

IN_EACH_RUN = {
    "every entry point": ["fully sharded", "central, on a replica"],
    "several steps": ["model parallel", "4 on each of 2"],
    "distributed dataset": ["one worker"],
    "loop, metrics": [
        "shard_update",
        "fully sharded",
        "central, elsewhere",
        "hierarchical",
    ],
    "loop, built in it": ["central, elsewhere"],
    "loop, two optimizers": ["shard_update", "central, elsewhere"],
    "loop, tape": ["model parallel", "fully sharded", "4 on each of 2"],
    "loop, function": ["central, on a replica"],
    "step, tape": ["shard_update", "central, elsewhere"],
    "step, stateless": ["central, on a replica"],
    "optimizer, clipped, averaged": ["central, on a replica", "shard_update"],
    "optimizer, scaled": ["central, on a replica", "shard_update"],
    "optimizer, own apply, lookahead": ["fully sharded", "central, elsewhere"],
    "optimizer, own apply, halved": ["shard_update"],
}
"""The strategies under which a case runs in each run of the tests; others are slow."""

ON_ONE_IN_EACH_RUN = {
    "loop, metrics",
    "loop, tape",
    "loop, two optimizers",
    "distributed dataset",
    "layers, convolutions",
    "optimizer, accumulated",
    "optimizer, clipnorm",
    "optimizer, clipvalue",
    "optimizer, clipped, averaged",
    "optimizer, own apply, clipped",
}


@functools.cache
def expected(case: str, num_replicas: int) -> Any:
    """The results of a case with mirrored variables."""
    return result_of(case, mirrored(num_replicas))


def result_of(case: str, strategy: rx.Strategy) -> Any:
    return jax.tree.map(np.asarray, CASES[case](strategy))


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(
            case,
            strategy,
            marks=[] if strategy in IN_EACH_RUN.get(case, ()) else pytest.mark.slow,
        )
        for case in CASES
        for strategy in STRATEGIES
    ],
)
def test_strategies_train_alike(case: str, strategy: str) -> None:
    num_replicas, make = STRATEGIES[strategy]
    actual = result_of(case, make())
    # Sums are in another order: over the rows of one device instead of over devices,
    # and over parts of a product. Adam and momentum make more of it in each step.
    assert_same(actual, expected(case, num_replicas), rtol=1e-4, atol=1e-5)


@pytest.mark.slow(but=[f"{case}-4" for case in ON_ONE_IN_EACH_RUN])
@pytest.mark.parametrize("num_replicas", [2, 4, 8])
@pytest.mark.parametrize("case", SAME_ON_ONE)
def test_replicas_train_as_one(case: str, num_replicas: int) -> None:
    actual = expected(case, num_replicas)
    assert_same(actual, result_on_one(case), rtol=2e-4, atol=2e-5)


@functools.cache
def result_on_one(case: str) -> Any:
    return result_of(case, rx.OneDeviceStrategy("cpu:0"))


@pytest.mark.parametrize(
    "strategy", [name for name, (number, _) in STRATEGIES.items() if number > 1]
)
def test_values_that_differ_between_replicas_are_refused(strategy: str) -> None:
    _, make = STRATEGIES[strategy]
    made = make()
    with made.scope():
        kernel = network().layers[0].kernel

    def step() -> None:
        kernel.assign(kernel + rx.get_replica_context().replica_id_in_sync_group)

    with pytest.raises(rx.DivergenceError, match="kernel"):
        made.run(step)


def test_clipping_changes_these_gradients() -> None:
    """Otherwise the cases of clipping could not fail."""
    clipped = expected("optimizer, clipnorm", 2)
    free = result_of_optimizer(lambda: optimizers.SGD(0.5))
    (kernel,) = [name for name in free if name.startswith("00 ")]
    assert np.abs(clipped[kernel] - free[kernel]).max() > 1e-3


def result_of_optimizer(make: Callable[[], Any]) -> Any:
    return fit_of(functools.partial(by_optimizer, make))(mirrored(2))


def test_an_overflow_is_skipped() -> None:
    """Otherwise the case of the loss scale would test no overflow."""
    result = expected("optimizer, scaled", 2)
    assert all(np.isfinite(x).all() for k, x in result.items() if k != "history")
    (iterations,) = [x for k, x in result.items() if "iteration" in k][:1]
    assert iterations < 6


# `apply` of a user's optimizer.


def test_layers_of_classes_and_names_of_arguments() -> None:
    class Twice(Halved):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply([g / 2 for g in grads], trainable_variables)

    strategy = mirrored(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = Twice(1.0)
    for call in (
        lambda g: optimizer.apply([g], [weight]),
        lambda g: optimizer.apply(trainable_variables=[weight], grads=[g]),
        lambda g: optimizer.apply(iter([g]), iter([weight])),
        lambda g: optimizer.apply_gradients([(g, weight)]),
        lambda g: optimizer.apply([g]),
    ):
        weight.assign(0.0)
        strategy.run(call, args=(3.0,))
        assert float(weight) == -2 * 3.0 / 4


def test_without_a_strategy_nothing_changes() -> None:
    layer = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    layer.build((None, 1))
    Halved(1.0).apply([ops.ones((1, 1))], layer.trainable_variables)
    assert float(layer.kernel[0, 0]) == -0.5
