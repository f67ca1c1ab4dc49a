"""The residual network of seed 004, whose three programs train it.

The text lost its indentation, which is back. `train_dataset` and `val_dataset` are
nowhere defined in it: here they are scikit-learn's digits, enlarged to 32x32 pixels in
three channels.
"""

from typing import Any

import grain
import numpy as np
from keras.layers import (
    Activation,
    Add,
    BatchNormalization,
    Conv2D,
    Dense,
    GlobalAveragePooling2D,
    Input,
    MaxPooling2D,
)
from keras.models import Model
from sklearn.datasets import load_digits

__all__ = ["create_resnet_model", "datasets"]


# Define the residual block
def residual_block(x: Any, filters: int, strides: int = 1) -> Any:
    shortcut = x
    x = Conv2D(filters, kernel_size=(3, 3), strides=strides, padding="same")(x)
    x = BatchNormalization()(x)
    x = Activation("relu")(x)
    x = Conv2D(filters, kernel_size=(3, 3), strides=1, padding="same")(x)
    x = BatchNormalization()(x)
    if strides != 1:
        shortcut = Conv2D(filters, kernel_size=(1, 1), strides=strides, padding="same")(
            shortcut
        )
        shortcut = BatchNormalization()(shortcut)
    x = Add()([x, shortcut])
    return Activation("relu")(x)


# Define the ResNet model
def create_resnet_model(
    input_shape: tuple[int, ...], num_classes: int, width: int = 64
) -> Model:
    inputs = Input(shape=input_shape)
    x = Conv2D(width, kernel_size=(7, 7), strides=2, padding="same")(inputs)
    x = BatchNormalization()(x)
    x = Activation("relu")(x)
    x = MaxPooling2D(pool_size=(3, 3), strides=2, padding="same")(x)
    x = residual_block(x, filters=width)
    x = residual_block(x, filters=width)
    x = residual_block(x, filters=2 * width, strides=2)
    x = residual_block(x, filters=2 * width)
    x = residual_block(x, filters=4 * width, strides=2)
    x = residual_block(x, filters=4 * width)
    x = residual_block(x, filters=8 * width, strides=2)
    x = residual_block(x, filters=8 * width)
    x = GlobalAveragePooling2D()(x)
    outputs = Dense(num_classes, activation="softmax")(x)
    return Model(inputs=inputs, outputs=outputs)


def datasets(batch_size: int = 32) -> tuple[Any, Any]:
    """160 digits as images `float32[32, 32, 3]` with one-hot classes, 128 to train."""
    images, labels = load_digits(return_X_y=True)
    x = (images[:160] / 16).astype("float32").reshape(-1, 8, 8, 1)
    x = np.tile(np.kron(x, np.ones((1, 4, 4, 1), "float32")), 3)
    y = np.eye(10, dtype="float32")[labels[:160]]
    examples = list(zip(x, y, strict=True))
    return (
        grain.MapDataset.source(examples[:128]).batch(batch_size),
        grain.MapDataset.source(examples[128:]).batch(batch_size),
    )
