"""replicax: `fit`, or a loop of one's own."""

import protocol

import replicax as rx

if protocol.DEVICES > 1:
    rx.set_logical_devices(protocol.DEVICES)

import keras
import keras_models

if protocol.WORLD > 1:
    strategy: rx.Strategy = rx.MultiWorkerMirroredStrategy()
elif protocol.DEVICES > 1:
    strategy = rx.MirroredStrategy(shard_update=protocol.SHARD_UPDATE)
else:
    strategy = rx.OneDeviceStrategy("cpu:0")
resident = protocol.resident_bytes()
with strategy.scope():
    model = keras_models.build(keras, protocol.CASE)
    optimizer = keras.optimizers.Adam(protocol.CASE.learning_rate)
    model.compile(
        optimizer,
        keras_models.loss_of(keras, protocol.CASE),
        steps_per_execution=32 if protocol.LOOP == "fit32" else 1,
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
        return rx.compute_average_loss(losses)

    loss, grads = rx.value_and_grad(loss_fn, model.trainable_variables)()
    optimizer.apply(grads, model.trainable_variables)
    return loss


def custom(start: int, count: int) -> float:
    """A loop of one's own on a distributed dataset."""
    batches = strategy.experimental_distribute_dataset(
        lambda: (protocol.batch(i) for i in range(start, start + count))
    )
    losses = None
    for batch in batches:
        losses = strategy.run(replica_step, (batch,))
    return float(strategy.reduce("sum", losses))


protocol.serve(custom if protocol.LOOP == "custom" else fit, prepare, resident)
