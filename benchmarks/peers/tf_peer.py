"""TensorFlow's MultiWorkerMirroredStrategy, in a loop of one's own.

With tf_keras (Keras 2): with Keras 3 this strategy does not train.
"""

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import protocol
import tensorflow as tf
import tf_keras

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    hidden = [tf_keras.layers.Dense(n, "relu") for n in protocol.SIZES[1:-1]]
    model = tf_keras.Sequential([*hidden, tf_keras.layers.Dense(10)])
    model.build((None, protocol.SIZES[0]))
    model.set_weights([array for pair in protocol.WEIGHTS for array in pair])
    optimizer = tf_keras.optimizers.Adam(protocol.LEARNING_RATE, epsilon=1e-8)
    example_loss = tf_keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )


@tf.function
def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """One step on all workers."""

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = example_loss(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=protocol.BATCH)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    losses = strategy.run(replica_step, (x, y))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


def train(start: int, count: int) -> float:
    """Each worker feeds its own part of every batch."""
    for i in range(start, start + count):
        x, y = protocol.local_batch(i)
        loss = step(tf.constant(x), tf.constant(y))
    return float(loss)


protocol.serve(train)
