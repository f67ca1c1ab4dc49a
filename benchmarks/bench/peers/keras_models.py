"""The models in Keras: Keras 3 on JAX or TensorFlow, or tf_keras."""

import re
from typing import Any

from cases import Case, bottlenecks, initial


def build(keras: Any, case: Case) -> Any:
    """The model of a case, with its first weights; it returns logits.

    Args:
        keras: The module, `keras` or `tf_keras`.
        case: The case.
    """
    if case.dtype != "float32":
        keras.config.set_dtype_policy(f"mixed_{case.dtype}")
    model = _BUILDERS[case.model](keras, case)
    for layer in model.layers:
        for variable, name in _named_weights(layer):
            variable.assign(initial(name, tuple(variable.shape)))
    return model


def loss_of(keras: Any, case: Case, **arguments: Any) -> Any:
    """The loss of a case."""
    if case.num_classes:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)
    return keras.losses.MeanSquaredError(**arguments)


def optimizer_of(keras: Any, case: Case) -> Any:
    """The optimizer of a case."""
    if case.momentum:
        return keras.optimizers.SGD(case.learning_rate, case.momentum)
    return keras.optimizers.Adam(case.learning_rate, epsilon=1e-7)


def _named_weights(layer: Any) -> list[tuple[Any, str]]:
    # Keras 3 has paths, tf_keras names with ":0"; both begin with the layer's name, or,
    # in a model, with the model's. One name differs.
    names = [
        getattr(w, "path", w.name).split(":")[0].replace("depthwise_kernel", "kernel")
        for w in layer.weights
    ]
    names = [re.sub(r"lstm_cell(_\d+)?/", "", name) for name in names]
    return [
        (weight, name[name.index(layer.name) :])
        for weight, name in zip(layer.weights, names, strict=True)
    ]


def _mlp(keras: Any, case: Case) -> Any:
    return keras.Sequential(
        [
            keras.Input(case.input_shape),
            keras.layers.Dense(2048, "relu", name="hidden_0"),
            keras.layers.Dense(2048, "relu", name="hidden_1"),
            keras.layers.Dense(case.num_classes, name="output"),
        ]
    )


def _cnn(keras: Any, case: Case) -> Any:
    return keras.Sequential(
        [
            keras.Input(case.input_shape),
            keras.layers.Conv2D(32, 3, activation="relu", name="conv_0"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu", name="conv_1"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, "relu", name="hidden"),
            keras.layers.Dense(case.num_classes, name="output"),
        ]
    )


def _resnet(keras: Any, case: Case) -> Any:
    layers = keras.layers

    def convolution(x: Any, filters: int, size: int, strides: int, name: str) -> Any:
        x = layers.Conv2D(filters, size, strides, padding="same", name=name)(x)
        return layers.BatchNormalization(name=f"{name}_norm")(x)

    inputs = keras.Input(case.input_shape)
    x = layers.Activation("relu")(convolution(inputs, 64, 7, 2, "stem"))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for i, (filters, strides) in enumerate(RESNET_BLOCKS):
        shortcut = x
        x = convolution(x, filters, 3, strides, f"block_{i}_conv_0")
        x = layers.Activation("relu")(x)
        x = convolution(x, filters, 3, 1, f"block_{i}_conv_1")
        if strides != 1:
            shortcut = convolution(shortcut, filters, 1, strides, f"block_{i}_shortcut")
        x = layers.Activation("relu")(layers.Add()([x, shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(case.num_classes, name="output")(x))


RESNET_BLOCKS = [
    (64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)
]  # fmt: skip
"""Filters and strides of the blocks."""


def _resnet50(keras: Any, case: Case) -> Any:
    layers = keras.layers

    def convolution(x: Any, filters: int, size: int, strides: int, name: str) -> Any:
        padding = "same"
        if strides != 1:
            # The same on all sides, which cuDNN takes without a copy.
            x, padding = layers.ZeroPadding2D(size // 2)(x), "valid"
        x = layers.Conv2D(
            filters, size, strides, padding=padding, use_bias=False, name=name
        )(x)
        return layers.BatchNormalization(name=f"{name}_norm")(x)

    inputs = keras.Input(case.input_shape, dtype="uint8")
    x = layers.Rescaling(1 / 127.5, -1)(inputs)
    x = layers.Activation("relu")(convolution(x, case.width, 7, 2, "stem"))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for name, _, filters, strides, has_shortcut in bottlenecks(case):
        shortcut = x
        x = layers.Activation("relu")(convolution(x, filters, 1, 1, f"{name}_conv_0"))
        x = convolution(x, filters, 3, strides, f"{name}_conv_1")
        x = layers.Activation("relu")(x)
        x = convolution(x, 4 * filters, 1, 1, f"{name}_conv_2")
        if has_shortcut:
            shortcut = convolution(
                shortcut, 4 * filters, 1, strides, f"{name}_shortcut"
            )
        x = layers.Activation("relu")(layers.Add()([x, shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(case.num_classes, name="output")(x))


def _mobilenet(keras: Any, case: Case) -> Any:
    return keras.applications.MobileNetV2(
        input_shape=case.input_shape,
        weights=None,
        classes=case.num_classes,
        classifier_activation=None,
    )


def _transformer(keras: Any, case: Case) -> Any:
    layers, ops = keras.layers, keras.ops if hasattr(keras, "ops") else None
    (length,), (depth,) = case.input_shape, case.depths
    width, heads = case.width, case.heads

    class Positions(layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.embeddings = self.add_weight(
                name="embeddings", shape=(length, width), initializer="zeros"
            )
            self.built = True

        def call(self, x: Any) -> Any:
            return x + (ops.convert_to_tensor if ops else lambda v: v)(self.embeddings)

    inputs = keras.Input(case.input_shape, dtype="int32")
    x = layers.Embedding(case.num_classes, width, name="tokens")(inputs)
    x = Positions(name="positions")(x)
    for i in range(depth):
        y = layers.LayerNormalization(epsilon=1e-6, name=f"block_{i}_norm_0")(x)
        attention = layers.MultiHeadAttention(
            heads, width // heads, name=f"block_{i}_attention"
        )
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(epsilon=1e-6, name=f"block_{i}_norm_1")(x)
        y = layers.Dense(4 * width, "relu", name=f"block_{i}_expand")(y)
        y = layers.Dense(width, name=f"block_{i}_contract")(y)
        x = layers.Add()([x, y])
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    return keras.Model(inputs, layers.Dense(case.num_classes, name="output")(x))


def _lstm(keras: Any, case: Case) -> Any:
    (depth,) = case.depths
    return keras.Sequential(
        [
            keras.Input(case.input_shape),
            *(
                keras.layers.LSTM(
                    case.width, return_sequences=i < depth - 1, name=f"lstm_{i}"
                )
                for i in range(depth)
            ),
            keras.layers.Dense(case.num_classes, name="output"),
        ]
    )


def _unet(keras: Any, case: Case) -> Any:
    layers = keras.layers

    def block(x: Any, filters: int, depth: int, name: str) -> Any:
        for i in range(depth):
            x = layers.Conv2D(
                filters, 3, padding="same", activation="relu", name=f"{name}_conv_{i}"
            )(x)
        return x

    x = inputs = keras.Input(case.input_shape)
    skipped = []
    for stage, depth in enumerate(case.depths):
        if stage:
            skipped.append(x)
            x = layers.MaxPooling2D()(x)
        x = block(x, case.width << stage, depth, f"down_{stage}")
    for stage, depth in reversed(list(enumerate(case.depths[:-1]))):
        filters = case.width << stage
        x = layers.Conv2DTranspose(
            filters, 3, strides=2, padding="same", name=f"up_{stage}"
        )(x)
        x = layers.Concatenate()([x, skipped[stage]])
        x = block(x, filters, depth, f"up_{stage}")
    return keras.Model(inputs, layers.Conv2D(case.num_classes, 1, name="output")(x))


def _tiny(keras: Any, case: Case) -> Any:
    return keras.Sequential(
        [
            keras.Input(case.input_shape),
            keras.layers.Dense(32, name="hidden_0"),
            keras.layers.Dense(16, "relu", name="hidden_1"),
            keras.layers.Dense(1, name="output"),
        ]
    )


_BUILDERS = {
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet": _resnet,
    "resnet50": _resnet50,
    "mobilenet": _mobilenet,
    "transformer": _transformer,
    "tiny": _tiny,
    "lstm": _lstm,
    "unet": _unet,
}
