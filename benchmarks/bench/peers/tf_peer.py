"""TensorFlow's tf.distribute: `fit`, or a loop of one's own.

With Keras 3, or with tf_keras where BENCH_KERAS is 2. MultiWorkerMirroredStrategy
trains with tf_keras alone.
"""

import os
from typing import Any

LEGACY = os.environ["BENCH_KERAS"] == "2"
os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_USE_LEGACY_KERAS"] = str(int(LEGACY))
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras_models
import protocol
import tensorflow as tf

if LEGACY:
    import tf_keras as keras
else:
    import keras

tf.config.threading.set_intra_op_parallelism_threads(protocol.CORES)
if protocol.DEVICES > 1:
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * protocol.DEVICES
    tf.config.set_logical_device_configuration(cpu, logical)
if protocol.WORLD > 1:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
elif protocol.DEVICES > 1:
    devices = [d.name for d in tf.config.list_logical_devices("CPU")]
    strategy = tf.distribute.MirroredStrategy(devices)
else:
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
resident = protocol.resident_bytes()
with strategy.scope():
    model = keras_models.build(keras, protocol.CASE)
    optimizer = keras.optimizers.Adam(protocol.CASE.learning_rate, epsilon=1e-7)
    model.compile(
        optimizer,
        keras_models.loss_of(keras, protocol.CASE),
        steps_per_execution=protocol.STEPS_PER_CALL,
    )
    reduction = "none" if LEGACY else None
    example_loss = keras_models.loss_of(keras, protocol.CASE, reduction=reduction)
batches: Any = None


def prepare(start: int, count: int) -> None:
    """The global batches; each worker takes its part of every one."""
    global batches
    rows = tf.data.Dataset.from_tensor_slices(protocol.rows(start, count))
    rows = rows.batch(protocol.BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    batches = rows.with_options(options).prefetch(2)
    if protocol.LOOP == "custom":
        batches = strategy.experimental_distribute_dataset(batches)


def fit(start: int, count: int) -> float:
    """As in TensorFlow's guides."""
    history = model.fit(batches, verbose=0)
    return history.history["loss"][-1]


@tf.function
def step(batch: tuple) -> tf.Tensor:
    """One step on all replicas."""

    def replica_step(batch: tuple) -> tf.Tensor:
        inputs, labels = batch
        with tf.GradientTape() as tape:
            losses = example_loss(labels, model(inputs, training=True))
            # Tokens or pixels.
            losses = tf.reduce_mean(losses, list(range(1, losses.shape.rank)))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=protocol.BATCH)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    losses = strategy.run(replica_step, (batch,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


def custom(start: int, count: int) -> float:
    """A loop of one's own on a distributed dataset."""
    loss = tf.constant(0.0)
    for batch in batches:
        loss = step(batch)
    return float(loss)


protocol.serve(custom if protocol.LOOP == "custom" else fit, prepare, resident)
