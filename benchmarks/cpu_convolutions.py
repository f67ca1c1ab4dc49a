"""Convolutions on CPUs: replicax' lowerings and compiler options, over XLA's own.

And gradients of max pooling. Layers are timed forward and with all gradients, networks
as whole training steps with SGD. Both programs are compiled first and take turns in
each round; the table has the median of the rounds' ratios, and below 1 ours is faster.

    python benchmarks/cpu_convolutions.py --rounds 5
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import replicax  # noqa: F401  (sets Keras' backend)

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import keras  # isort: skip
import numpy as np  # isort: skip
from jax import lax  # isort: skip

from replicax.cpu import lowering, settings  # isort: skip

# Name, batch, size, kernel, stride, features, outputs, groups.
LAYERS = [
    ("3x3, 64 to 64 at 16x16", 16, 16, 3, 1, 64, 64, 1),
    ("3x3, 32 to 32 at 64x64, batch 4", 4, 64, 3, 1, 32, 32, 1),
    ("3x3, 512 to 512 at 2x2", 16, 2, 3, 1, 512, 512, 1),
    ("3x3 stride 2, 256 to 512 at 4x4", 16, 4, 3, 2, 256, 512, 1),
    ("5x5, 1 to 6 at 28x28, batch 64", 64, 28, 5, 1, 1, 6, 1),
    ("3x3, 3 to 32 at 32x32, batch 64", 64, 32, 3, 1, 3, 32, 1),
    ("7x7 stride 2, 3 to 64 at 64x64", 16, 64, 7, 2, 3, 64, 1),
    ("1x1, 24 to 144 at 24x24", 16, 24, 1, 1, 24, 144, 1),
    ("3x3, 4 groups, 128 to 128 at 8x8", 16, 8, 3, 1, 128, 128, 4),
    ("3x3, 8 groups, 32 to 32 at 24x24", 16, 24, 3, 1, 32, 32, 8),
    ("3x3 depthwise, 144 at 24x24", 16, 24, 3, 1, 144, 144, 144),
    ("3x3 depthwise stride 2, 96 at 48x48", 16, 48, 3, 2, 96, 96, 96),
    ("7x7 depthwise, 64 at 24x24", 16, 24, 7, 1, 64, 64, 64),
]
# Name, shape, size of the window, stride, padding.
POOLING = [
    ("max pool 2x2, 32 at 26x26, batch 64", (64, 26, 26, 32), 2, 2, "VALID"),
    ("max pool 2x2, 64 at 11x11, batch 64", (64, 11, 11, 64), 2, 2, "VALID"),
    ("max pool 3x3 stride 2, 64 at 32x32", (16, 32, 32, 64), 3, 2, "SAME"),
    ("max pool 5x5 stride 1, 64 at 24x24", (16, 24, 24, 64), 5, 1, "SAME"),
]
Case = tuple[str, Callable, tuple]


def layer(name, batch, size, taps, stride, features, outputs, groups) -> Case:
    def forward(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    def step(x, w, g):
        y, back = jax.vjp(forward, x, w)
        return y, back(g)

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(batch, size, size, features)), "float32")
    shape = (taps, taps, features // groups, outputs)
    w = jnp.asarray(rng.normal(size=shape), "float32")
    g = jnp.ones(jax.eval_shape(forward, x, w).shape)
    return name, step, (x, w, g)


def volume() -> Case:
    def forward(x, w):
        return lax.conv_general_dilated(
            x, w, (1,) * 3, "SAME", dimension_numbers=("NHWDC", "HWDIO", "NHWDC")
        )

    def step(x, w, g):
        y, back = jax.vjp(forward, x, w)
        return y, back(g)

    x, w = jnp.ones((4, 12, 12, 12, 16)), jnp.ones((3, 3, 3, 16, 32))
    return "3x3x3, 16 to 32 at 12x12x12", step, (x, w, jnp.ones((4, 12, 12, 12, 32)))


def pooling(name, shape, size, stride, padding) -> Case:
    def forward(x):
        return lax.reduce_window(
            x, -np.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), padding
        )

    def step(x, g):
        y, back = jax.vjp(forward, x)
        return y, back(g)

    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    g = jnp.ones(jax.eval_shape(forward, x).shape)
    return name, step, (jnp.asarray(x), g)


def mnist_cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def resnet18() -> keras.Model:
    def conv(x, outputs, taps, stride):
        x = keras.layers.Conv2D(
            outputs, taps, strides=stride, padding="same", use_bias=False
        )(x)
        return keras.layers.BatchNormalization()(x)

    inputs = keras.Input((64, 64, 3))
    x = keras.layers.ReLU()(conv(inputs, 64, 7, 2))
    x = keras.layers.MaxPooling2D(3, 2, padding="same")(x)
    for i, outputs in enumerate([64, 128, 256, 512]):
        for stride in (1 if i == 0 else 2, 1):
            kept = x if stride == 1 else conv(x, outputs, 1, stride)
            y = conv(keras.layers.ReLU()(conv(x, outputs, 3, stride)), outputs, 3, 1)
            x = keras.layers.ReLU()(y + kept)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def mobilenet() -> keras.Model:
    return keras.applications.MobileNetV2(
        (96, 96, 3), weights=None, classes=10, classifier_activation=None
    )


def network(name: str, make: Callable[[], keras.Model], batch: int) -> Case:
    keras.utils.set_random_seed(0)
    model = make()
    trainable = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(batch, *model.input_shape[1:])), "float32")
    y = jnp.asarray(rng.integers(0, 10, batch))

    def loss(trainable, others, x, y):
        logits, others = model.stateless_call(trainable, others, x, training=True)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
        return -jnp.mean(picked), others

    def step(trainable, others, x, y):
        grads, others = jax.grad(loss, has_aux=True)(trainable, others, x, y)
        return [w - 0.01 * g for w, g in zip(trainable, grads, strict=True)], others

    return name, step, (trainable, others, x, y)


def timed(program, arguments: tuple) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return (time.perf_counter() - start) * 1e3


def compare(case: Case, rounds: int) -> None:
    name, step, arguments = case
    options = settings.compiler_options(os.environ)
    programs = [
        jax.jit(step).lower(*arguments).compile(),
        jax.jit(lowering.apply(step)).lower(*arguments).compile(options),
    ]
    for program in programs:
        timed(program, arguments)
    times = [[timed(p, arguments) for p in programs] for _ in range(rounds)]
    ratios = [ours / theirs for theirs, ours in times]
    xla, ours = (statistics.median(column) for column in zip(*times, strict=True))
    held = [p.memory_analysis().temp_size_in_bytes / 1e6 for p in programs]
    print(
        f"| {name} | {xla:.1f} | {ours:.1f} | {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) | {held[0]:.0f} | {held[1]:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["layers", "pooling", "networks"])
    options = parser.parse_args()
    print("| case | XLA ms | ours ms | ratio (min to max) | XLA MB | ours MB |")
    print("|---|---|---|---|---|---|")
    if options.only in (None, "layers"):
        for shape in LAYERS:
            compare(layer(*shape), options.rounds)
        compare(volume(), options.rounds)
    if options.only in (None, "pooling"):
        for shape in POOLING:
            compare(pooling(*shape), options.rounds)
    if options.only in (None, "networks"):
        compare(network("MNIST CNN, batch 64", mnist_cnn, 64), options.rounds)
        compare(network("ResNet-18, 64x64, batch 16", resnet18, 16), options.rounds)
        compare(network("MobileNetV2, 96x96, batch 16", mobilenet, 16), options.rounds)


if __name__ == "__main__":
    main()
