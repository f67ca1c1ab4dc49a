"""The training script of `docs/plan.md`; the page says what to run it with.

replicax plan --topology v5e:2x4 docs/figures/plan_mobilenet.py
"""

from collections.abc import Iterator

import keras
import numpy as np

import replicax as rx

strategy = rx.MirroredStrategy()
batch = 64 * strategy.num_replicas_in_sync

with strategy.scope():
    model = keras.applications.MobileNetV2(
        weights=None,  # pyright: ignore[reportArgumentType]  As Keras documents it.
        input_shape=(224, 224, 3),
    )
    model.compile(
        optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"]
    )


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Black images. Each batch is one number in memory, whatever its shape."""
    while True:
        yield (
            np.broadcast_to(np.float32(0), (batch, 224, 224, 3)),
            np.broadcast_to(np.int32(0), (batch,)),
        )


model.fit(batches(), steps_per_epoch=100, shuffle=False)
