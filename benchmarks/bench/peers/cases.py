"""What is trained in each case: shapes, data and first weights, in NumPy alone.

Peers build the same models in their own libraries, with layers of the same names, and
take first weights from `initial`.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["CASES", "Case", "bottlenecks", "case_of", "initial"]

_POOL = 8  # Global batches of data; training goes through them again and again.


@dataclass(frozen=True)
class Case:
    """A model, a batch and a learning rate.

    Attributes:
        key: Its letter.
        model: The model's name.
        title: What tables call it.
        batch: The global batch on one device.
        input_shape: Of one example.
        num_classes: Classes of a label; 0: labels are numbers.
        learning_rate: The optimizer's.
        batch_grows: Whether each replica has `batch` examples, not all of them.
        depths: Blocks or layers of each stage; of models that come in several sizes.
        width: Of the first stage.
        heads: Of attention.
        momentum: If it is not 0, SGD with it trains the model, else Adam.
        dtype: Of computation; weights are float32 always.
    """

    key: str
    model: str
    title: str
    batch: int
    input_shape: tuple[int, ...]
    num_classes: int
    learning_rate: float = 1e-4
    batch_grows: bool = False
    depths: tuple[int, ...] = ()
    width: int = 0
    heads: int = 0
    momentum: float = 0.0
    dtype: str = "float32"

    @property
    def unit(self) -> str:
        """What is counted per second: "images", "tokens" or "examples"."""
        if self.model == "transformer":
            return "tokens"
        return "images" if len(self.input_shape) == 3 else "examples"

    def units(self, batch: int) -> int:
        """How many of them a global batch has."""
        return batch * (self.input_shape[0] if self.model == "transformer" else 1)

    def flops(self, batch: int) -> float | None:
        """What a step of this global batch has to multiply and add, by the model.

        Two for each multiplication with its addition, and three times those of the
        forward pass. Matrix products and convolutions alone; attention counts whole, as
        is the custom, though the causal half would do.

        Returns:
            Operations, or None for models that nobody counted.
        """
        if self.model == "resnet50":
            return 6.0 * batch * _resnet50_products(self)
        if self.model == "transformer":
            (depth,), (length,) = self.depths, self.input_shape
            weights = self.width * (12 * depth * self.width + self.num_classes)
            attention = 12 * depth * length * self.width
            return float(self.units(batch) * (6 * weights + attention))
        return None

    def data(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of some global batches of this size."""
        rng = np.random.default_rng(0)
        shape = (_POOL * batch, *self.input_shape)
        if self.model == "transformer":
            tokens = rng.integers(0, self.num_classes, (shape[0], shape[1] + 1))
            tokens = tokens.astype("int32")
            return tokens[:, :-1], tokens[:, 1:]
        if self.model == "resnet50":  # Bytes, as images are; the model scales them.
            x = rng.integers(0, 256, shape, "uint8")
            return x, rng.integers(0, self.num_classes, len(x)).astype("int32")
        x = rng.normal(size=shape).astype("float32")
        if self.model == "unet":  # A class for each pixel.
            return x, rng.integers(0, self.num_classes, x.shape[:3]).astype("int32")
        if not self.num_classes:
            y = x[:, :1] - 2 * x[:, 1:2] + rng.normal(size=(len(x), 1))
            return x, y.astype("float32")
        return x, rng.integers(0, self.num_classes, len(x)).astype("int32")


CASES = {
    case.key: case
    for case in (
        Case("a", "mlp", "MLP 784-2048-2048-10", 256, (784,), 10),
        Case("b", "cnn", "MNIST CNN", 64, (28, 28, 1), 10, 1e-3, batch_grows=True),
        Case("c", "resnet", "ResNet-18, 64 px", 16, (64, 64, 3), 10),
        Case("d", "mobilenet", "MobileNetV2, 96 px", 16, (96, 96, 3), 10),
        Case(
            "e",
            "transformer",
            "Transformer, 6 layers",
            16,
            (128,),
            2048,
            depths=(6,),
            width=256,
            heads=8,
        ),
        Case("f", "tiny", "Dense 32-16-1", 64, (5,), 0, 1e-3),
        # All entries of a table wait on one card. Of 96 images, XLA keeps 50 to 110 MB
        # each: at most 10.5 GB; torch less. Five times that and torch's 7 GB are 60 GB,
        # and the libraries themselves take 0.6 GB in each of six processes.
        Case(
            "g",
            "resnet50",
            "ResNet-50, 224 px, bfloat16",
            96,
            (224, 224, 3),
            1000,
            1e-2,
            depths=(3, 4, 6, 3),
            width=64,
            momentum=0.9,
            dtype="bfloat16",
        ),
        # 168 million weights with Adam's moments, gradients and a bfloat16 copy: 3 GB.
        # 0.3 GB of activations a layer, and 0.4 GB of attention weights where they are
        # written out: 7 to 12 GB.
        Case(
            "h",
            "transformer",
            "Transformer, 12 layers of 1024, bfloat16",
            16,
            (512,),
            8192,
            depths=(12,),
            width=1024,
            heads=16,
            dtype="bfloat16",
        ),
        Case(
            "i",
            "lstm",
            "LSTM, 2 layers of 128, 64 steps",
            32,
            (64, 32),
            10,
            depths=(2,),
            width=128,
        ),
        Case(
            "j",
            "unet",
            "U-Net, 64 px",
            8,
            (64, 64, 3),
            4,
            depths=(2, 2, 2),
            width=32,
        ),
    )
}

_TINY = {
    "g": replace(
        CASES["g"],
        batch=8,
        input_shape=(64, 64, 3),
        num_classes=10,
        depths=(2, 1),
        width=8,
    ),
    "h": replace(
        CASES["h"],
        batch=4,
        input_shape=(16,),
        num_classes=64,
        depths=(2,),
        width=32,
        heads=4,
    ),
}


def case_of(key: str, tiny: bool = False) -> Case:
    """The case of a letter.

    Args:
        key: The letter.
        tiny: Take a case of a GPU so small that a CPU soon runs it, to test programs.
    """
    return _TINY.get(key, CASES[key]) if tiny else CASES[key]


def bottlenecks(case: Case) -> Iterator[tuple[str, int, int, int, bool]]:
    """The blocks of a ResNet-50: name, inputs, filters inside, strides, shortcut.

    A block has four times its filters for outputs; the convolution of 3x3 has the
    strides ("v1.5"), and the shortcut a convolution where it is True.
    """
    inputs = case.width
    for stage, depth in enumerate(case.depths):
        filters = case.width << stage
        for i in range(depth):
            strides = 2 if stage and not i else 1
            yield f"stage_{stage}_block_{i}", inputs, filters, strides, not i
            inputs = 4 * filters


def _resnet50_products(case: Case) -> int:
    """Multiplications of an image's forward pass."""
    size = case.input_shape[0] // 2
    products = size**2 * 7 * 7 * case.input_shape[-1] * case.width
    size, outputs = size // 2, 0
    for _, inputs, filters, strides, has_shortcut in bottlenecks(case):
        outputs = 4 * filters
        products += size**2 * inputs * filters
        size //= strides
        products += size**2 * filters * (9 * filters + outputs)
        products += size**2 * inputs * outputs * has_shortcut
    return products + outputs * case.num_classes


def initial(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The first value of a weight, the same in every process.

    Args:
        name: `layer/weight`, such as `hidden_0/kernel`; Keras' names of weights.
        shape: Keras' shape of it. Kernels are normally distributed with variance
            2 / (number of inputs); embeddings with 0.02 for a deviation.
    """
    weight = name.split("/")[-1]
    if weight in ("bias", "beta", "moving_mean"):
        return np.zeros(shape, "float32")
    if weight in ("gamma", "moving_variance"):
        return np.ones(shape, "float32")
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(
        shape, "float32"
    )
    if weight == "embeddings":
        return values * np.float32(0.02)
    return values * np.float32(np.sqrt(2 / _num_inputs(name, shape)))


def _num_inputs(name: str, shape: tuple[int, ...]) -> int:
    if "attention_output" in name:
        return shape[0] * shape[1]  # heads, size, outputs
    if "attention" in name:
        return shape[0]  # inputs, heads, size
    if "depthwise" in name:
        return shape[0] * shape[1]  # height, width, channels, 1
    return int(np.prod(shape[:-1]))
