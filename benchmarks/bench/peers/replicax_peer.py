"""replicax: `fit`, or a loop of one's own."""

from collections.abc import Iterable
from typing import Any

import protocol

import replicax as rx

if protocol.DEVICES > 1:
    rx.set_logical_devices(protocol.DEVICES)

import jax
import keras
import keras_models

if protocol.WORLD > 1:
    strategy: rx.Strategy = rx.MultiWorkerMirroredStrategy(
        communication_options=rx.CommunicationOptions(compression=protocol.COMPRESSION),
        shard_update=protocol.SHARD_UPDATE,
    )
elif protocol.DEVICES > 1:
    strategy = rx.MirroredStrategy(shard_update=protocol.SHARD_UPDATE)
else:
    platform = "gpu" if protocol.PLATFORM == "cuda" else "cpu"
    strategy = rx.OneDeviceStrategy(f"{platform}:0")
resident = protocol.resident_bytes()
with strategy.scope():
    model = keras_models.build(keras, protocol.CASE)
    optimizer = keras_models.optimizer_of(keras, protocol.CASE)
    model.compile(
        optimizer,
        keras_models.loss_of(keras, protocol.CASE),
        steps_per_execution=protocol.STEPS_PER_CALL,
    )
    example_loss = keras_models.loss_of(keras, protocol.CASE, reduction=None)
data = protocol.rows(0, 1)


def prepare(start: int, count: int) -> None:
    """Arrays for `fit`, which every worker holds."""
    global data
    if protocol.LOOP != "custom":
        data = protocol.rows(start, count)


def fit(start: int, count: int) -> float:
    """As in Keras' guides."""
    history = model.fit(*data, batch_size=protocol.BATCH, shuffle=False, verbose=0)
    return history.history["loss"][-1]


def replica_step(batch: tuple) -> object:
    """One step of one replica."""
    inputs, labels = batch

    def loss_fn() -> object:
        losses = example_loss(labels, model(inputs, training=True))
        # Tokens or pixels; as in TensorFlow, they would be summed.
        losses = losses.mean(range(1, losses.ndim))
        return rx.compute_average_loss(losses)

    loss, grads = rx.value_and_grad(loss_fn, model.trainable_variables)()
    optimizer.apply(grads, model.trainable_variables)
    return loss


def batches_of(start: int, count: int) -> Iterable[Any]:
    """These batches, distributed."""
    return strategy.experimental_distribute_dataset(
        lambda: (protocol.batch(i) for i in range(start, start + count))
    )


def custom(start: int, count: int) -> float:
    """A loop of one's own on a distributed dataset."""
    losses = None
    if held:
        batches = (held[i % len(held)] for i in range(start, start + count))
    else:
        batches = batches_of(start, count)
    for batch in batches:
        losses = strategy.run(replica_step, (batch,))
    return float(strategy.reduce("sum", losses))


def wait() -> None:
    """Wait for the weights."""
    if protocol.ACCELERATED:
        jax.block_until_ready([v.value for v in model.variables])


is_custom = protocol.LOOP == "custom"
# All batches that there are, on the device already.
held: list[Any] = []
if is_custom and protocol.ACCELERATED:
    held = list(batches_of(0, protocol.NUM_BATCHES))
protocol.serve(
    custom if is_custom else fit,
    prepare,
    resident,
    wait,
    protocol.jax_peak_bytes,
)
