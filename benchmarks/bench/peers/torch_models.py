"""The models in torch: the functions of the Keras models, from the same first weights.

Data is NHWC, as for Keras, and the models see it as NCHW. Each has the memory format in
which it trains faster: channels_last, which is the order of the data, but for the
ResNet of CPUs.
"""

from collections.abc import Callable

import numpy as np
import torch
from cases import Case, bottlenecks, initial
from keras_models import RESNET_BLOCKS
from torch import nn
from torch.nn import functional

__all__ = ["build", "loss_of"]


def build(case: Case) -> nn.Module:
    """The model of a case, with its first weights; it returns logits.

    Args:
        case: The case.
    """
    return _BUILDERS[case.model](case)


def loss_of(case: Case, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss of a batch, over all tokens for the transformer.

    Args:
        case: The case.
        outputs: What the model returned.
        y: Labels as the case's data has them.
    """
    if not case.num_classes:
        return functional.mse_loss(outputs, y)
    # torch's cross entropy takes labels of 64 bits only.
    return functional.cross_entropy(outputs.flatten(0, -2), y.long().flatten())


# The layers, each with the first weights that Keras' layer of this name has. Keras has
# the outputs of a kernel last, torch first.


def _set(parameter: nn.Parameter, value: np.ndarray) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(value))


def _dense(name: str, inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    _set(layer.weight, initial(f"{name}/kernel", (inputs, outputs)).T)
    _set(layer.bias, initial(f"{name}/bias", (outputs,)))
    return layer


def _dense_of_image(
    name: str, height: int, width: int, channels: int, outputs: int
) -> nn.Linear:
    # Keras flattens images in the order NHWC, torch in NCHW: here the rows of the
    # kernel are put into torch's order, once.
    layer = nn.Linear(height * width * channels, outputs)
    kernel = initial(f"{name}/kernel", (height * width * channels, outputs))
    kernel = kernel.reshape(height, width, channels, outputs).transpose(3, 2, 0, 1)
    _set(layer.weight, kernel.reshape(outputs, -1))
    _set(layer.bias, initial(f"{name}/bias", (outputs,)))
    return layer


def _convolution(
    name: str,
    inputs: int,
    outputs: int,
    size: int,
    strides: int = 1,
    padding: int = 0,
    bias: bool = True,
) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, size, strides, padding, bias=bias)
    kernel = initial(f"{name}/kernel", (size, size, inputs, outputs))
    _set(layer.weight, kernel.transpose(3, 2, 0, 1))
    if layer.bias is not None:
        _set(layer.bias, initial(f"{name}/bias", (outputs,)))
    return layer


def _depthwise(name: str, channels: int, strides: int, padding: int) -> nn.Conv2d:
    layer = nn.Conv2d(
        channels, channels, 3, strides, padding, groups=channels, bias=False
    )
    kernel = initial(f"{name}/kernel", (3, 3, channels, 1))
    _set(layer.weight, kernel.transpose(2, 3, 0, 1))
    return layer


def _same_padding(size: int, strides: int) -> list[nn.Module]:
    # Of an image with even height and width, Keras' "same" pads what the windows lack,
    # and the odd one at the bottom and on the right; convolutions of torch pad all
    # sides alike.
    missing = max(size - strides, 0)
    before = missing // 2
    after = missing - before
    return [nn.ZeroPad2d((before, after, before, after))] if missing else []


def _batch_norm(channels: int, keras_momentum: float = 0.99) -> nn.BatchNorm2d:
    # torch's own first weights, ones and zeros, are Keras'. The moving variance is of
    # another estimate, divided by n - 1; training does not read it.
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=1 - keras_momentum)


def _layer_norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6)


class _FromNHWC(nn.Module):
    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.memory_format = memory_format

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # In channels_last the data is a view: nothing is copied.
        return x.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)


def _image_model(
    memory_format: torch.memory_format, *layers: nn.Module
) -> nn.Sequential:
    model = nn.Sequential(_FromNHWC(memory_format), *layers)
    # Only kernels of convolutions, the weights of four dimensions, change their order.
    return model.to(memory_format=memory_format)


def _mlp(case: Case) -> nn.Module:
    return nn.Sequential(
        _dense("hidden_0", case.input_shape[0], 2048),
        nn.ReLU(),
        _dense("hidden_1", 2048, 2048),
        nn.ReLU(),
        _dense("output", 2048, case.num_classes),
    )


def _cnn(case: Case) -> nn.Module:
    return _image_model(
        torch.channels_last,
        _convolution("conv_0", case.input_shape[-1], 32, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        _convolution("conv_1", 32, 64, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        _dense_of_image("hidden", 5, 5, 64, 128),
        nn.ReLU(inplace=True),
        _dense("output", 128, case.num_classes),
    )


class _ResNetBlock(nn.Module):
    def __init__(self, name: str, inputs: int, filters: int, strides: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_normed_convolution(f"{name}_conv_0", inputs, filters, 3, strides),
            nn.ReLU(inplace=True),
            *_normed_convolution(f"{name}_conv_1", filters, filters, 3, 1),
        )
        self.shortcut = nn.Sequential()  # It returns what it is given.
        if strides != 1:
            self.shortcut = nn.Sequential(
                *_normed_convolution(f"{name}_shortcut", inputs, filters, 1, strides)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


def _normed_convolution(
    name: str, inputs: int, filters: int, size: int, strides: int
) -> list[nn.Module]:
    if strides == 1:
        convolution = _convolution(name, inputs, filters, size, padding=size // 2)
        return [convolution, _batch_norm(filters)]
    convolution = _convolution(name, inputs, filters, size, strides)
    return [*_same_padding(size, strides), convolution, _batch_norm(filters)]


def _resnet(case: Case) -> nn.Module:
    inputs = 64
    blocks = []
    for i, (filters, strides) in enumerate(RESNET_BLOCKS):
        blocks.append(_ResNetBlock(f"block_{i}", inputs, filters, strides))
        inputs = filters
    return _image_model(
        torch.contiguous_format,
        *_normed_convolution("stem", case.input_shape[-1], 64, 7, 2),
        nn.ReLU(inplace=True),
        # Of an even size, the last window lacks one row: that is "same" padding, with
        # minus infinity and no copy.
        nn.MaxPool2d(3, 2, ceil_mode=True),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        _dense("output", inputs, case.num_classes),
    )


class _FromBytes(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Of NHWC this is a view, in channels_last.
        return x.permute(0, 3, 1, 2).to(self.dtype) * (1 / 127.5) - 1


class _Bottleneck(nn.Module):
    def __init__(
        self, name: str, inputs: int, filters: int, strides: int, has_shortcut: bool
    ) -> None:
        super().__init__()
        outputs = 4 * filters
        self.body = nn.Sequential(
            *_plain_convolution(f"{name}_conv_0", inputs, filters, 1, 1),
            nn.ReLU(inplace=True),
            *_plain_convolution(f"{name}_conv_1", filters, filters, 3, strides),
            nn.ReLU(inplace=True),
            *_plain_convolution(f"{name}_conv_2", filters, outputs, 1, 1),
        )
        self.shortcut = nn.Sequential()
        if has_shortcut:
            self.shortcut = nn.Sequential(
                *_plain_convolution(f"{name}_shortcut", inputs, outputs, 1, strides)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


def _plain_convolution(
    name: str, inputs: int, filters: int, size: int, strides: int
) -> list[nn.Module]:
    padding = size // 2
    return [
        _convolution(name, inputs, filters, size, strides, padding, bias=False),
        _batch_norm(filters),
    ]


def _resnet50(case: Case) -> nn.Module:
    outputs = 4 * case.width * 2 ** (len(case.depths) - 1)
    model = nn.Sequential(
        _FromBytes(getattr(torch, case.dtype)),
        *_plain_convolution("stem", case.input_shape[-1], case.width, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        *(_Bottleneck(*block) for block in bottlenecks(case)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        _dense("output", outputs, case.num_classes),
    )
    return model.to(memory_format=torch.channels_last)


_MOBILENET_MOMENTUM = 0.999

# Filters and strides of the blocks.
_MOBILENET_BLOCKS = [
    (16, 1), (24, 2), (24, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1),
    (64, 1), (96, 1), (96, 1), (96, 1), (160, 2), (160, 1), (160, 1), (320, 1),
]  # fmt: skip


class _InvertedResidual(nn.Module):
    def __init__(self, index: int, inputs: int, filters: int, strides: int) -> None:
        super().__init__()
        # The first block does not expand.
        name = f"block_{index}" if index else "expanded_conv"
        layers, inside = [], inputs
        if index:
            inside = 6 * inputs
            layers += _pointwise(f"{name}_expand", inputs, inside)
            layers.append(nn.ReLU6(inplace=True))
        if strides != 1:
            layers += _same_padding(3, strides)
        layers += [
            _depthwise(f"{name}_depthwise", inside, strides, int(strides == 1)),
            _batch_norm(inside, _MOBILENET_MOMENTUM),
            nn.ReLU6(inplace=True),
            *_pointwise(f"{name}_project", inside, filters),
        ]
        self.body = nn.Sequential(*layers)
        self.adds = strides == 1 and inputs == filters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.adds else self.body(x)


def _pointwise(name: str, inputs: int, filters: int) -> list[nn.Module]:
    return [
        _convolution(name, inputs, filters, 1, bias=False),
        _batch_norm(filters, _MOBILENET_MOMENTUM),
    ]


def _mobilenet(case: Case) -> nn.Module:
    inputs = 32
    blocks = []
    for i, (filters, strides) in enumerate(_MOBILENET_BLOCKS):
        blocks.append(_InvertedResidual(i, inputs, filters, strides))
        inputs = filters
    return _image_model(
        torch.channels_last,
        *_same_padding(3, 2),
        _convolution("Conv1", case.input_shape[-1], 32, 3, 2, bias=False),
        _batch_norm(32, _MOBILENET_MOMENTUM),
        nn.ReLU6(inplace=True),
        *blocks,
        *_pointwise("Conv_1", inputs, 1280),
        nn.ReLU6(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        _dense("predictions", 1280, case.num_classes),
    )


class _Attention(nn.Module):
    def __init__(self, name: str, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        size = width // heads
        # One multiplication for query, key and value.
        self.inputs = nn.Linear(width, 3 * width)
        kernels = [
            initial(f"{name}/{part}/kernel", (width, heads, size)).reshape(width, width)
            for part in ("query", "key", "value")
        ]
        _set(self.inputs.weight, np.concatenate(kernels, axis=1).T)
        nn.init.zeros_(self.inputs.bias)
        self.outputs = nn.Linear(width, width)
        kernel = initial(f"{name}/attention_output/kernel", (heads, size, width))
        _set(self.outputs.weight, kernel.reshape(width, width).T)
        nn.init.zeros_(self.outputs.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.inputs(x).chunk(3, dim=-1)
        )
        x = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outputs(x.transpose(1, 2).flatten(2))


class _TransformerBlock(nn.Module):
    def __init__(self, name: str, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            _layer_norm(width), _Attention(f"{name}_attention", width, heads)
        )
        self.dense = nn.Sequential(
            _layer_norm(width),
            _dense(f"{name}_expand", width, 4 * width),
            nn.ReLU(inplace=True),
            _dense(f"{name}_contract", 4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.dense(x)


class _Embeddings(nn.Module):
    def __init__(self, num_tokens: int, length: int, width: int) -> None:
        super().__init__()
        tokens = initial("tokens/embeddings", (num_tokens, width))
        self.tokens = nn.Embedding.from_pretrained(
            torch.from_numpy(tokens), freeze=False
        )
        positions = initial("positions/embeddings", (length, width))
        self.positions = nn.Parameter(torch.from_numpy(positions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions


def _transformer(case: Case) -> nn.Module:
    (length,), width, heads = case.input_shape, case.width, case.heads
    return nn.Sequential(
        _Embeddings(case.num_classes, length, width),
        *(_TransformerBlock(f"block_{i}", width, heads) for i in range(case.depths[0])),
        _layer_norm(width),
        _dense("output", width, case.num_classes),
    )


class _LSTM(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        (depth,), inputs = case.depths, case.input_shape[-1]
        self.lstm = nn.LSTM(inputs, case.width, depth, batch_first=True)
        for i in range(depth):
            for weight, name in (("ih", "kernel"), ("hh", "recurrent_kernel")):
                parameter = getattr(self.lstm, f"weight_{weight}_l{i}")
                shape = parameter.shape[::-1]
                _set(parameter, initial(f"lstm_{i}/{name}", tuple(shape)).T)
                nn.init.zeros_(getattr(self.lstm, f"bias_{weight}_l{i}"))
            # torch adds two biases, Keras has one.
            getattr(self.lstm, f"bias_hh_l{i}").requires_grad_(False)
        self.outputs = _dense("output", case.width, case.num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outputs(self.lstm(x)[0][:, -1])


class _UNet(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.down, self.up, self.transposed = (nn.ModuleList() for _ in range(3))
        inputs = case.input_shape[-1]
        for stage, depth in enumerate(case.depths):
            filters = case.width << stage
            self.down.append(_unet_block(f"down_{stage}", inputs, filters, depth))
            inputs = filters
        for stage, depth in reversed(list(enumerate(case.depths[:-1]))):
            filters, name = case.width << stage, f"up_{stage}"
            layer = nn.ConvTranspose2d(inputs, filters, 3, 2)
            kernel = initial(f"{name}/kernel", (3, 3, filters, inputs))
            _set(layer.weight, kernel.transpose(3, 2, 0, 1))
            nn.init.zeros_(layer.bias)
            self.transposed.append(layer)
            self.up.append(_unet_block(name, 2 * filters, filters, depth))
            inputs = filters
        self.outputs = _convolution("output", inputs, case.num_classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for i, block in enumerate(self.down):
            if i:
                skipped.append(x)
                x = functional.max_pool2d(x, 2)
            x = block(x)
        for block, transposed in zip(self.up, self.transposed, strict=True):
            # Keras' "same" crops the last row and column.
            x = transposed(x)[..., :-1, :-1]
            x = block(torch.cat([x, skipped.pop()], 1))
        return self.outputs(x).permute(0, 2, 3, 1)


def _unet_block(name: str, inputs: int, filters: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(depth):
        layers += [
            _convolution(f"{name}_conv_{i}", inputs, filters, 3, padding=1),
            nn.ReLU(inplace=True),
        ]
        inputs = filters
    return nn.Sequential(*layers)


def _tiny(case: Case) -> nn.Module:
    return nn.Sequential(
        _dense("hidden_0", case.input_shape[0], 32),
        _dense("hidden_1", 32, 16),
        nn.ReLU(),
        _dense("output", 16, 1),
    )


_BUILDERS: dict[str, Callable[[Case], nn.Module]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "resnet": _resnet,
    "resnet50": _resnet50,
    "mobilenet": _mobilenet,
    "transformer": _transformer,
    "tiny": _tiny,
    "lstm": _LSTM,
    "unet": lambda case: _image_model(torch.channels_last, _UNet(case)),
}
