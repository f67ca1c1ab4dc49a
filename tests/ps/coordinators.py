"""Jobs with a `ClusterCoordinator`, for tests."""

import os
import time

import keras
import numpy as np
from tests.ps.jobs import make

import replicax as rx

NUM_ROWS, DIM, ROUNDS, PER_ROUND = 20, 4, 4, 20


class Trainer:
    """A variable and rows that each step lowers by one, and a metric that counts."""

    def __init__(self, options):
        self.strategy = make(options)
        self.session = self.strategy.session
        self.coordinator = rx.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            self.layer = rx.layers.Embedding(
                NUM_ROWS, DIM, embeddings_initializer="zeros", name="words"
            )
            self.layer.build()
            self.total = keras.Variable(0.0, name="total")
            self.optimizer = keras.optimizers.SGD(1.0)
            self.count = keras.metrics.Sum(name="count")
        data = self.coordinator.create_per_worker_dataset(self.batches)
        self.iterator = iter(data)

    def batches(self, context):
        print(f"<{os.getpid()}: makes its dataset>", flush=True)
        time.sleep(float(os.environ.get("SLOW_DATASET", "0")))
        while True:
            yield np.arange(NUM_ROWS, dtype="int32")

    def step(self, number, iterator):
        """Lower the variable and row `number % NUM_ROWS` by one."""
        ids = next(iterator)[[number % NUM_ROWS]]

        def replica_fn():
            def loss_of():
                return keras.ops.sum(self.layer(ids)) + self.total

            variables = [self.layer.anchor, self.total]
            _, gradients = rx.value_and_grad(loss_of, variables)()
            self.optimizer.apply(gradients, variables)

        self.strategy.run(replica_fn)
        self.count.update_state(1.0)
        print(f"<{os.getpid()}: pushed {number}>", flush=True)
        time.sleep(0.05)
        return number

    def found(self, returned):
        with self.strategy.scope():
            rows = np.asarray(self.layer(np.arange(NUM_ROWS, dtype="int32")))
        servers = [c.call("store.status") for c in self.session.connections]
        return {
            "returned": returned,
            "total": float(self.total.value),
            "rows": rows,
            "count": float(self.count.result()),
            "iterations": int(self.optimizer.iterations),
            "dense": [
                {k: s[k] for k in ("applied", "lost")} for s in servers if s["groups"]
            ],
            "tables": [
                {k: s["tables"]["words"][k] for k in ("applied", "lost")}
                for s in servers
            ],
        }
