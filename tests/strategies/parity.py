"""A table of strategies, small models, and the same training under two strategies."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import keras
import numpy as np
from keras import layers

import replicax as rx

NUM_STEPS = 3
BATCH_SIZE = 24

# The first kernel is split on 2 and 4 devices, the rest is too small or indivisible.
NUM_FEATURES, NUM_UNITS, NUM_CLASSES = 48, 32, 10


def cpus(number: int) -> list[str]:
    return [f"cpu:{i}" for i in range(number)]


STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored 2": lambda: rx.MirroredStrategy(cpus(2)),
    "mirrored 4": lambda: rx.MirroredStrategy(cpus(4)),
    "virtual": lambda: rx.MirroredStrategy(cpus(2), replicas_per_device=2),
    "shard_update": lambda: rx.MirroredStrategy(cpus(2), shard_update=True),
    "fully sharded": lambda: rx.FullyShardedStrategy(cpus(2)),
    "model parallel": lambda: rx.ModelParallelStrategy(None, 2, devices=cpus(4)),
    "central storage": lambda: rx.CentralStorageStrategy(cpus(2), "cpu:4"),
}


def data(num: int = BATCH_SIZE * NUM_STEPS, seed: int = 0) -> tuple[Any, Any]:
    """`float32[num, 48]` and `int32[num]`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, NUM_FEATURES)).astype("float32")
    return x, rng.integers(0, NUM_CLASSES, num).astype("int32")


def crossentropy(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def network(*hidden: Any) -> Any:
    hidden = hidden or (layers.Dense(NUM_UNITS, activation="relu"),)
    return keras.Sequential(
        [keras.Input((NUM_FEATURES,)), *hidden, layers.Dense(NUM_CLASSES)]
    )


def compiled(model: Any, optimizer: Any = "adam", **options: Any) -> Any:
    model.compile(optimizer, crossentropy(), **options)
    return model


def state(model: Any, optimizer: Any = None) -> dict[str, np.ndarray]:
    """Weights and optimizer variables, by number and name."""
    optimizer = optimizer or model.optimizer
    # In the order of their numbers, which a dict's keys are sorted by.
    variables = enumerate([*model.variables, *optimizer.variables])
    # Keras numbers layers on, and may forget the model's name when it loads one.
    return {
        f"{i:02} {re.sub(r'_[0-9]+|^sequential(_[0-9]+)?_', '', v.name)}": np.asarray(v)
        for i, v in variables
    }


def fitted(
    strategy: Any, make: Callable[[], Any], xy: Any = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """A model that was trained in `fit`, and its state and history."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
    history = model.fit(
        *(xy or data()),
        **{"batch_size": BATCH_SIZE, "verbose": 0, "shuffle": False} | options,
    )
    return model, {**state(model), "history": history.history}


def example_loss(model: Any, x: Any, y: Any) -> Any:
    losses = crossentropy(reduction=None)(y, model(x, training=True))
    return rx.compute_average_loss(losses, global_batch_size=BATCH_SIZE)


def looped(
    strategy: Any,
    make_optimizer: Callable[[], Any],
    make_step: Callable[[Any, Any], Callable[..., Any]] | None = None,
    num_steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """The state after a custom loop."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, optimizer = network(), make_optimizer()
        optimizer.build(model.trainable_variables)
    step = (make_step or functional_step)(model, optimizer)
    outputs = []
    for batch in batches(strategy, num_steps):
        outputs.append(strategy.run(step, batch))
    return {**state(model, optimizer), "outputs": jax.tree.map(np.asarray, outputs)}


def batches(strategy: Any, num_steps: int = NUM_STEPS) -> Iterable[Any]:
    xy = data(BATCH_SIZE * num_steps)
    return strategy.experimental_distribute_dataset(
        xy, batch_size=BATCH_SIZE, prefetch=0
    )


def functional_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        loss, grads = rx.value_and_grad(
            lambda: example_loss(model, x, y), model.trainable_variables
        )()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    return step


def tape_step(model: Any, optimizer: Any) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = example_loss(model, x, y)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    return step


def assert_same(
    actual: Any, expected: Any, *, rtol: float = 2e-5, atol: float = 2e-6
) -> None:
    """Compare array by array.

    Shards change the order of sums over a whole array, such as a norm, and XLA fuses an
    update of a shard in another way. Both change about 1e-7 of a value in each step; an
    optimizer that divides by a root of small second moments enlarges this.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual),
        jax.tree.leaves(expected),
        strict=True,
    ):
        np.testing.assert_allclose(
            a, e, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path)
        )


def texts_of_programs(strategy: Any) -> list[tuple[str, str]]:
    """Lowered and compiled texts of the programs that the strategy runs from now on."""
    texts: list[tuple[str, str]] = []
    original = strategy.runner.call

    def call(program: Any, arrays: Any) -> Any:
        lowered = program.lower([v.value for v in program.inputs], arrays)
        texts.append((lowered.as_text(), lowered.compile().as_text()))
        return original(program, arrays)

    strategy.runner.call = call
    return texts


def blocks_of(variable: Any) -> list[tuple[int, ...]]:
    """The shapes of what each device holds of a variable."""
    return [x.data.shape for x in variable.value.addressable_shards]


def bytes_on(variables: Iterable[Any], device: Any) -> int:
    """Bytes of the variables on one device."""
    return sum(
        shard.data.nbytes
        for v in variables
        for shard in v.value.addressable_shards
        if shard.device == device
    )


class StatelessStep(keras.Sequential):
    """A `train_step` as the Keras guide for JAX has it."""

    def loss_of(self, trainable: Any, non_trainable: Any, x: Any, y: Any) -> Any:
        outputs, non_trainable = self.stateless_call(
            trainable, non_trainable, x, training=True
        )
        return self.compute_loss(x, y, outputs), non_trainable

    def change(self, values: Any) -> Any:
        """Change the new weights; subclasses override it."""
        return values

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, slots, metrics = state
        (loss, non_trainable), grads = jax.value_and_grad(self.loss_of, has_aux=True)(
            trainable, non_trainable, *data
        )
        trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        trainable = self.change(trainable)
        return {"loss": loss}, (trainable, non_trainable, slots, metrics)


class TapeStep(keras.Sequential):
    """A `train_step` as tf.keras has it, with a metric of its own."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with rx.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {"loss": loss}
