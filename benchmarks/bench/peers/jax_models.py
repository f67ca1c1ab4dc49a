"""The models in bare JAX: functions of dicts of weights.

They do the operations that Keras' layers do on JAX, with the same weights by the same
names, so that a difference in time is the library's and not another model's.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, bottlenecks, initial
from jax import lax
from keras_models import RESNET_BLOCKS

__all__ = ["MODELS", "Weights", "computing", "first_weights", "loss_of"]

Weights = dict[str, jax.Array]
"""Arrays by Keras' names of weights."""

_Shapes = dict[str, tuple[int, ...]]


def first_weights(
    case: Case,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A case's first parameters, and its first moving statistics."""
    params, stats = {}, {}
    for name, shape in _SHAPES[case.model](case).items():
        (stats if "/moving_" in name else params)[name] = initial(name, shape)
    return params, stats


def computing(case: Case, params: Weights) -> Weights:
    """Parameters in the type that the case computes in.

    Layer normalisations have theirs in float32, as in Keras; batch normalisations
    compute in float32 with parameters that were rounded.
    """
    if case.dtype == "float32":
        return params
    kept = ("/gamma", "/beta") if case.model == "transformer" else ()
    return {
        name: value if name.endswith(kept) else value.astype(case.dtype)
        for name, value in params.items()
    }


def loss_of(case: Case, logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss of a batch."""
    if not case.num_classes:
        return jnp.mean(jnp.square(labels - logits))
    logits = logits.astype("float32")
    # As Keras: a product with a one-hot array, not a look-up.
    target = jax.nn.one_hot(labels, case.num_classes)
    return jnp.mean(-jnp.sum(target * jax.nn.log_softmax(logits), axis=-1))


# Layers.


def _dense(params: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def _convolution(
    params: Weights,
    name: str,
    x: jax.Array,
    strides: int = 1,
    padding: str | list[tuple[int, int]] = "SAME",
) -> jax.Array:
    kernel, groups = params[f"{name}/kernel"], 1
    if name.endswith("depthwise"):
        groups = x.shape[-1]
        kernel = kernel.reshape(*kernel.shape[:2], 1, groups)
    x = lax.conv_general_dilated(
        x,
        kernel,
        (strides, strides),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
    bias = params.get(f"{name}/bias")
    return x if bias is None else x + bias


def _max_pool(x: jax.Array, size: int, padding: str) -> jax.Array:
    window, strides = (1, size, size, 1), (1, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def _batch_norm(
    params: Weights, stats: Weights, name: str, x: jax.Array, momentum: float = 0.99
) -> tuple[jax.Array, Weights]:
    """The layer in training, and `stats` with its moving statistics moved on."""
    wide = x.astype("float32")  # As in Keras; so it is for layers.
    mean, variance = jnp.mean(wide, (0, 1, 2)), jnp.var(wide, (0, 1, 2))
    moved = {
        key: stats[key] * momentum + value * (1 - momentum)
        for key, value in (
            (f"{name}/moving_mean", mean),
            (f"{name}/moving_variance", variance),
        )
    }
    normalized = _normalized(params, name, wide, mean, variance, 1e-3)
    return normalized.astype(x.dtype), stats | moved


def _layer_norm(params: Weights, name: str, x: jax.Array) -> jax.Array:
    wide = x.astype("float32")
    mean = jnp.mean(wide, -1, keepdims=True)
    variance = jnp.var(wide, -1, keepdims=True)
    return _normalized(params, name, wide, mean, variance, 1e-6).astype(x.dtype)


def _normalized(
    params: Weights,
    name: str,
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    epsilon: float,
) -> jax.Array:
    scale = lax.rsqrt(variance + epsilon) * params[f"{name}/gamma"]
    return x * scale + (-mean * scale + params[f"{name}/beta"])


def _attention(params: Weights, name: str, x: jax.Array) -> jax.Array:
    query, key, value = (
        jnp.einsum("btd,dhk->bthk", x, params[f"{name}/{part}/kernel"])
        + params[f"{name}/{part}/bias"]
        for part in ("query", "key", "value")
    )
    x = jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        implementation="cudnn" if _has_flash(query.shape, query.dtype) else None,
    )
    name = f"{name}/attention_output"
    x = jnp.einsum("bthk,hkd->btd", x, params[f"{name}/kernel"])
    return x + params[f"{name}/bias"]


compiles_for_card = False
"""Whether steps are compiled for a card that is not here; `gpu_programs.py` says so."""


@cache
def _has_flash(shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Whether cuDNN has an attention for this; Keras asks the same functions of JAX."""
    on_card = jax.default_backend() == "gpu" or compiles_for_card
    if not on_card or dtype == jnp.float32:
        return False
    example = jax.ShapeDtypeStruct(shape, dtype)
    try:
        jax.eval_shape(
            lambda x: jax.nn.dot_product_attention(
                x, x, x, is_causal=True, implementation="cudnn"
            ),
            example,
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        print(f"No attention of cuDNN: {error}", file=sys.stderr)
        return False
    return True


# Models: logits, and new moving statistics.


def _mlp(params: Weights, stats: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    x = jax.nn.relu(_dense(params, "hidden_0", x))
    x = jax.nn.relu(_dense(params, "hidden_1", x))
    return _dense(params, "output", x), stats


def _cnn(params: Weights, stats: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    for name in ("conv_0", "conv_1"):
        x = jax.nn.relu(_convolution(params, name, x, padding="VALID"))
        x = _max_pool(x, 2, "VALID")
    x = jax.nn.relu(_dense(params, "hidden", x.reshape(len(x), -1)))
    return _dense(params, "output", x), stats


def _resnet(params: Weights, stats: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    def convolution(
        stats: Weights, name: str, x: jax.Array, strides: int
    ) -> tuple[jax.Array, Weights]:
        x = _convolution(params, name, x, strides)
        return _batch_norm(params, stats, f"{name}_norm", x)

    x, stats = convolution(stats, "stem", x, 2)
    x = _max_pool(jax.nn.relu(x), 3, "SAME")
    for i, (_, strides) in enumerate(RESNET_BLOCKS):
        shortcut = x
        x, stats = convolution(stats, f"block_{i}_conv_0", x, strides)
        x, stats = convolution(stats, f"block_{i}_conv_1", jax.nn.relu(x), 1)
        if strides != 1:
            name = f"block_{i}_shortcut"
            shortcut, stats = convolution(stats, name, shortcut, strides)
        x = jax.nn.relu(x + shortcut)
    return _dense(params, "output", jnp.mean(x, (1, 2))), stats


def _resnet50(case: Case) -> "Model":
    def model(
        params: Weights, stats: Weights, x: jax.Array
    ) -> tuple[jax.Array, Weights]:
        def convolution(
            stats: Weights, name: str, x: jax.Array, size: int, strides: int
        ) -> tuple[jax.Array, Weights]:
            padding = [(size // 2, size // 2)] * 2
            x = _convolution(params, name, x, strides, padding)
            return _batch_norm(params, stats, f"{name}_norm", x)

        x = x.astype(case.dtype) * (1 / 127.5) - 1
        x, stats = convolution(stats, "stem", x, 7, 2)
        x = _max_pool(jax.nn.relu(x), 3, "SAME")
        for name, _, _, strides, has_shortcut in bottlenecks(case):
            shortcut = x
            x, stats = convolution(stats, f"{name}_conv_0", x, 1, 1)
            x, stats = convolution(stats, f"{name}_conv_1", jax.nn.relu(x), 3, strides)
            x, stats = convolution(stats, f"{name}_conv_2", jax.nn.relu(x), 1, 1)
            if has_shortcut:
                shortcut, stats = convolution(
                    stats, f"{name}_shortcut", shortcut, 1, strides
                )
            x = jax.nn.relu(x + shortcut)
        return _dense(params, "output", jnp.mean(x, (1, 2))), stats

    return model


def _mobilenet(
    params: Weights, stats: Weights, x: jax.Array
) -> tuple[jax.Array, Weights]:
    def norm(stats: Weights, name: str, x: jax.Array) -> tuple[jax.Array, Weights]:
        return _batch_norm(params, stats, name, x, momentum=0.999)

    x, stats = norm(stats, "bn_Conv1", _convolution(params, "Conv1", x, 2))
    x = jax.nn.relu6(x)
    for block, inputs, wide, outputs, strides in _mobilenet_blocks():
        shortcut = x
        if wide != inputs:
            x = _convolution(params, f"{block}_expand", x)
            x, stats = norm(stats, f"{block}_expand_BN", x)
            x = jax.nn.relu6(x)
        padding = "SAME"
        if strides == 2:
            # As in Keras, an operation of its own; sizes are even.
            x, padding = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0))), "VALID"
        x = _convolution(params, f"{block}_depthwise", x, strides, padding)
        x, stats = norm(stats, f"{block}_depthwise_BN", x)
        x = _convolution(params, f"{block}_project", jax.nn.relu6(x))
        x, stats = norm(stats, f"{block}_project_BN", x)
        if strides == 1 and inputs == outputs:
            x = shortcut + x
    x, stats = norm(stats, "Conv_1_bn", _convolution(params, "Conv_1", x))
    x = jnp.mean(jax.nn.relu6(x), (1, 2))
    return _dense(params, "predictions", x), stats


def _mobilenet_blocks() -> Iterator[tuple[str, int, int, int, int]]:
    """Name, inputs, filters inside, outputs and strides of each block."""
    stages = [
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 2, 3), (6, 64, 2, 4),
        (6, 96, 1, 3), (6, 160, 2, 3), (6, 320, 1, 1),
    ]  # fmt: skip
    inputs, index = 32, 0
    for expansion, outputs, strides, repeats in stages:
        for repeat in range(repeats):
            name = f"block_{index}" if index else "expanded_conv"
            yield name, inputs, expansion * inputs, outputs, 1 if repeat else strides
            inputs, index = outputs, index + 1


def _transformer(case: Case) -> "Model":
    def model(
        params: Weights, stats: Weights, x: jax.Array
    ) -> tuple[jax.Array, Weights]:
        x = jnp.take(params["tokens/embeddings"], x, axis=0)
        x = x + params["positions/embeddings"]
        for i in range(case.depths[0]):
            y = _layer_norm(params, f"block_{i}_norm_0", x)
            x = x + _attention(params, f"block_{i}_attention", y)
            y = _layer_norm(params, f"block_{i}_norm_1", x)
            y = jax.nn.relu(_dense(params, f"block_{i}_expand", y))
            x = x + _dense(params, f"block_{i}_contract", y)
        return _dense(params, "output", _layer_norm(params, "norm", x)), stats

    return model


def _tiny(params: Weights, stats: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    x = _dense(params, "hidden_0", x)
    x = jax.nn.relu(_dense(params, "hidden_1", x))
    return _dense(params, "output", x), stats


def _lstm(case: Case) -> "Model":
    def layer(params: Weights, name: str, x: jax.Array) -> jax.Array:
        """The output of each time step, time first."""
        kernel = params[f"{name}/kernel"]
        recurrent = params[f"{name}/recurrent_kernel"]

        def cell(
            state: tuple[jax.Array, jax.Array], x: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = state
            z = x @ kernel + h @ recurrent + params[f"{name}/bias"]
            i, f, candidate, o = jnp.split(z, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(candidate)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros_like(x, shape=(x.shape[1], case.width))
        return lax.scan(cell, (zeros, zeros), x)[1]

    def model(
        params: Weights, stats: Weights, x: jax.Array
    ) -> tuple[jax.Array, Weights]:
        x = jnp.swapaxes(x, 0, 1)
        for i in range(case.depths[0]):
            x = layer(params, f"lstm_{i}", x)
        return _dense(params, "output", x[-1]), stats

    return model


def _unet(case: Case) -> "Model":
    def block(params: Weights, x: jax.Array, depth: int, name: str) -> jax.Array:
        for i in range(depth):
            x = jax.nn.relu(_convolution(params, f"{name}_conv_{i}", x))
        return x

    def model(
        params: Weights, stats: Weights, x: jax.Array
    ) -> tuple[jax.Array, Weights]:
        skipped = []
        for stage, depth in enumerate(case.depths):
            if stage:
                skipped.append(x)
                x = _max_pool(x, 2, "VALID")
            x = block(params, x, depth, f"down_{stage}")
        for stage, depth in reversed(list(enumerate(case.depths[:-1]))):
            x = lax.conv_transpose(
                x,
                params[f"up_{stage}/kernel"],
                (2, 2),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                transpose_kernel=True,
            )
            x = jnp.concatenate([x + params[f"up_{stage}/bias"], skipped[stage]], -1)
            x = block(params, x, depth, f"up_{stage}")
        return _convolution(params, "output", x), stats

    return model


Model = Callable[[Weights, Weights, jax.Array], tuple[jax.Array, Weights]]

MODELS: dict[str, Callable[[Case], Model]] = {
    "mlp": lambda case: _mlp,
    "cnn": lambda case: _cnn,
    "resnet": lambda case: _resnet,
    "resnet50": _resnet50,
    "mobilenet": lambda case: _mobilenet,
    "transformer": _transformer,
    "tiny": lambda case: _tiny,
    "lstm": _lstm,
    "unet": _unet,
}
"""Of a case: functions of parameters, moving statistics and inputs, in training."""


# Shapes of weights.


def _dense_shapes(sizes: dict[str, tuple[int, int]]) -> _Shapes:
    """Of layers with these inputs and outputs."""
    shapes: _Shapes = {}
    for name, (inputs, outputs) in sizes.items():
        shapes[f"{name}/kernel"] = (inputs, outputs)
        shapes[f"{name}/bias"] = (outputs,)
    return shapes


def _norm_shapes(name: str, size: int, weights: str) -> _Shapes:
    return {f"{name}/{weight}": (size,) for weight in weights.split()}


_LAYER_NORM = "gamma beta"
_BATCH_NORM = "gamma beta moving_mean moving_variance"


def _mlp_shapes(case: Case) -> _Shapes:
    return _dense_shapes(
        {
            "hidden_0": (case.input_shape[0], 2048),
            "hidden_1": (2048, 2048),
            "output": (2048, case.num_classes),
        }
    )


def _cnn_shapes(case: Case) -> _Shapes:
    return {
        "conv_0/kernel": (3, 3, 1, 32),
        "conv_0/bias": (32,),
        "conv_1/kernel": (3, 3, 32, 64),
        "conv_1/bias": (64,),
        **_dense_shapes({"hidden": (1600, 128), "output": (128, case.num_classes)}),
    }


def _resnet_shapes(case: Case) -> _Shapes:
    convolutions = {"stem": (7, 7, 3, 64)}
    inputs = 64
    for i, (filters, strides) in enumerate(RESNET_BLOCKS):
        convolutions[f"block_{i}_conv_0"] = (3, 3, inputs, filters)
        convolutions[f"block_{i}_conv_1"] = (3, 3, filters, filters)
        if strides != 1:
            convolutions[f"block_{i}_shortcut"] = (1, 1, inputs, filters)
        inputs = filters
    shapes = _dense_shapes({"output": (inputs, case.num_classes)})
    for name, kernel in convolutions.items():
        shapes |= {f"{name}/kernel": kernel, f"{name}/bias": kernel[-1:]}
        shapes |= _norm_shapes(f"{name}_norm", kernel[-1], _BATCH_NORM)
    return shapes


def _resnet50_shapes(case: Case) -> _Shapes:
    kernels = {"stem": (7, 7, case.input_shape[-1], case.width)}
    outputs = 0
    for name, inputs, filters, _, has_shortcut in bottlenecks(case):
        outputs = 4 * filters
        kernels[f"{name}_conv_0"] = (1, 1, inputs, filters)
        kernels[f"{name}_conv_1"] = (3, 3, filters, filters)
        kernels[f"{name}_conv_2"] = (1, 1, filters, outputs)
        if has_shortcut:
            kernels[f"{name}_shortcut"] = (1, 1, inputs, outputs)
    shapes = _dense_shapes({"output": (outputs, case.num_classes)})
    for name, kernel in kernels.items():
        shapes[f"{name}/kernel"] = kernel
        shapes |= _norm_shapes(f"{name}_norm", kernel[-1], _BATCH_NORM)
    return shapes


def _mobilenet_shapes(case: Case) -> _Shapes:
    shapes = {"Conv1/kernel": (3, 3, 3, 32)}
    shapes |= _norm_shapes("bn_Conv1", 32, _BATCH_NORM)
    for block, inputs, wide, outputs, _ in _mobilenet_blocks():
        if wide != inputs:
            shapes[f"{block}_expand/kernel"] = (1, 1, inputs, wide)
            shapes |= _norm_shapes(f"{block}_expand_BN", wide, _BATCH_NORM)
        shapes[f"{block}_depthwise/kernel"] = (3, 3, wide, 1)
        shapes |= _norm_shapes(f"{block}_depthwise_BN", wide, _BATCH_NORM)
        shapes[f"{block}_project/kernel"] = (1, 1, wide, outputs)
        shapes |= _norm_shapes(f"{block}_project_BN", outputs, _BATCH_NORM)
    shapes["Conv_1/kernel"] = (1, 1, 320, 1280)
    shapes |= _norm_shapes("Conv_1_bn", 1280, _BATCH_NORM)
    return shapes | _dense_shapes({"predictions": (1280, case.num_classes)})


def _transformer_shapes(case: Case) -> _Shapes:
    width, heads = case.width, case.heads
    size = width // heads
    shapes = {
        "tokens/embeddings": (case.num_classes, width),
        "positions/embeddings": (*case.input_shape, width),
        **_norm_shapes("norm", width, _LAYER_NORM),
        **_dense_shapes({"output": (width, case.num_classes)}),
    }
    for i in range(case.depths[0]):
        name = f"block_{i}_attention"
        for part in ("query", "key", "value"):
            shapes[f"{name}/{part}/kernel"] = (width, heads, size)
            shapes[f"{name}/{part}/bias"] = (heads, size)
        shapes[f"{name}/attention_output/kernel"] = (heads, size, width)
        shapes[f"{name}/attention_output/bias"] = (width,)
        shapes |= _norm_shapes(f"block_{i}_norm_0", width, _LAYER_NORM)
        shapes |= _norm_shapes(f"block_{i}_norm_1", width, _LAYER_NORM)
        shapes |= _dense_shapes(
            {
                f"block_{i}_expand": (width, 4 * width),
                f"block_{i}_contract": (4 * width, width),
            }
        )
    return shapes


def _tiny_shapes(case: Case) -> _Shapes:
    return _dense_shapes(
        {"hidden_0": (case.input_shape[0], 32), "hidden_1": (32, 16), "output": (16, 1)}
    )


def _lstm_shapes(case: Case) -> _Shapes:
    shapes = _dense_shapes({"output": (case.width, case.num_classes)})
    inputs = case.input_shape[-1]
    for i in range(case.depths[0]):
        shapes[f"lstm_{i}/kernel"] = (inputs, 4 * case.width)
        shapes[f"lstm_{i}/recurrent_kernel"] = (case.width, 4 * case.width)
        shapes[f"lstm_{i}/bias"] = (4 * case.width,)
        inputs = case.width
    return shapes


def _unet_shapes(case: Case) -> _Shapes:
    kernels = {"output": (1, 1, case.width, case.num_classes)}
    shapes: _Shapes = {}
    inputs = case.input_shape[-1]
    stages = list(enumerate(case.depths))
    for stage, depth in stages + stages[-2::-1]:
        filters = case.width << stage
        name = f"down_{stage}"
        if inputs > filters:  # Back up: a transposed kernel has its outputs first.
            name = f"up_{stage}"
            shapes |= {f"{name}/kernel": (3, 3, filters, inputs)}
            shapes |= {f"{name}/bias": (filters,)}
            inputs = 2 * filters
        for i in range(depth):
            kernels[f"{name}_conv_{i}"] = (3, 3, inputs, filters)
            inputs = filters
    for name, kernel in kernels.items():
        shapes |= {f"{name}/kernel": kernel, f"{name}/bias": kernel[-1:]}
    return shapes


_SHAPES: dict[str, Callable[[Case], _Shapes]] = {
    "mlp": _mlp_shapes,
    "cnn": _cnn_shapes,
    "resnet": _resnet_shapes,
    "resnet50": _resnet50_shapes,
    "mobilenet": _mobilenet_shapes,
    "transformer": _transformer_shapes,
    "tiny": _tiny_shapes,
    "lstm": _lstm_shapes,
    "unet": _unet_shapes,
}
