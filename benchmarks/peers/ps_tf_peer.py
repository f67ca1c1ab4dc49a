"""TensorFlow's ParameterServerStrategy: a task of its cluster.

The chief has the loop, with a ClusterCoordinator; workers and servers are servers of
TensorFlow's. With tf_keras (Keras 2), as Keras 3 has no such strategy.
"""

import os
import time

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import protocol
import tensorflow as tf
import tf_keras

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    )
    server.join()

# The table of embeddings lies on all servers; each other variable on one.
shards = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=2**25, max_shards=resolver.cluster_spec().num_tasks("ps")
)
strategy = tf.distribute.ParameterServerStrategy(resolver, shards)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    model = tf_keras.Sequential(
        [
            tf_keras.Input(protocol.SHAPE, dtype=protocol.DTYPE),
            *protocol.layers(tf_keras.layers, tf_keras.layers.Embedding),
        ]
    )
    protocol.set_weights(model)
    optimizer = protocol.optimizer(tf_keras.optimizers)
    optimizer.build(model.trainable_variables)
    # Keras counts a step when it begins, so that it says nothing of staleness.
    applied = tf.Variable(
        0,
        trainable=False,
        dtype=tf.int64,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
    example_loss = tf_keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )


UPDATES = {
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ResourceApplyAdam",
    "ResourceScatterAdd",
}
"""Types of the operations with which optimizers change variables."""


@tf.function
def step(batches: "tf.data.Iterator") -> tuple[tf.Tensor, tf.Tensor]:
    """A step of one worker: its loss, and the updates made since it read the values."""

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        before = tf.identity(applied)
        with tf.control_dependencies([before]):  # Else it is read when it suits.
            x = tf.identity(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(example_loss(y, model(x, training=True)))
        grads = tape.gradient(loss, model.trainable_variables)
        graph = tf.compat.v1.get_default_graph()
        others = set(graph.get_operations())
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        # An update counts when it is made, as on replicax' servers: not when its
        # gradients are there.
        made = set(graph.get_operations()) - others
        updates = [operation for operation in made if operation.type in UPDATES]
        with tf.control_dependencies(updates):
            now = applied.assign_add(1)
        return loss, tf.identity(now) - before - 1

    return strategy.run(replica_step, next(batches))


@tf.function
def dataset() -> "tf.data.Dataset":
    """What every worker trains on."""
    examples = tf.data.Dataset.from_tensor_slices((protocol.X, protocol.Y))
    # Each worker has an order of its own: in the same one both would train on a batch
    # together, as if its step were twice as large.
    examples = examples.shuffle(len(protocol.X)).batch(protocol.BATCH)
    return examples.repeat().prefetch(2)


batches = iter(coordinator.create_per_worker_dataset(dataset))


def train(start: int, count: int) -> str:
    """The steps that all workers make together: see replicax' peer."""
    begin = time.time()
    steps = [coordinator.schedule(step, (batches,)) for _ in range(count)]
    coordinator.join()
    end = time.time()
    losses, stale = zip(*(step.fetch() for step in steps), strict=True)
    return f"{sum(map(float, losses)) / count} {begin} {end} {sum(stale) / count}"


protocol.serve(train)
