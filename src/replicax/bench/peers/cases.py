"""What is trained in each case: shapes, data and first weights, in NumPy alone.

Peers build the same models in their own libraries, with layers of the same names, and
take first weights from `initial`.
"""

import zlib
from dataclasses import dataclass

import numpy as np

__all__ = ["CASES", "Case", "initial"]

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
        learning_rate: Adam's.
        batch_grows: Whether each replica has `batch` examples, not all of them.
    """

    key: str
    model: str
    title: str
    batch: int
    input_shape: tuple[int, ...]
    num_classes: int
    learning_rate: float = 1e-4
    batch_grows: bool = False

    def data(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of some global batches of this size."""
        rng = np.random.default_rng(0)
        shape = (_POOL * batch, *self.input_shape)
        if self.model == "transformer":
            tokens = rng.integers(0, self.num_classes, (shape[0], shape[1] + 1))
            tokens = tokens.astype("int32")
            return tokens[:, :-1], tokens[:, 1:]
        x = rng.normal(size=shape).astype("float32")
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
        Case("e", "transformer", "Transformer, 6 layers", 16, (128,), 2048),
        Case("f", "tiny", "Dense 32-16-1", 64, (5,), 0, 1e-3),
    )
}


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
