"""The examples' data: real digits, 8x8 from scikit-learn or MNIST-like from a file."""

import dataclasses
from pathlib import Path

import numpy as np

__all__ = ["Data", "load"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Images `float32[N, height, width, channels]` in 0..1 and their labels.

    Attributes:
        name: What to call the data in reports.
        x_train: Images to train on.
        y_train: Their classes, `int32[N]` from 0.
        x_test: Images held out.
        y_test: Their classes.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def num_classes(self) -> int:
        return int(self.y_train.max()) + 1


def load(path: str | None = None) -> Data:
    """Load an `.npz` file laid out as `keras.datasets` has it, or the digits.

    Args:
        path: File with `x_train`, `y_train`, `x_test` and `y_test`, images in 0..255.
            None: scikit-learn's 1,797 digits, of which a fifth is held out.
    """
    return _digits() if path is None else _from_file(Path(path))


def _digits() -> Data:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        _as_images(images.reshape(-1, 8, 8), 16),
        labels.astype("int32"),
        test_size=0.2,
        stratify=labels,
        random_state=0,
    )
    return Data(
        name="digits", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test
    )


def _from_file(path: Path) -> Data:
    with np.load(path) as file:
        missing = {"x_train", "y_train", "x_test", "y_test"} - set(file)
        if missing:
            raise SystemExit(f"{path}: has no {', '.join(sorted(missing))}.")
        return Data(
            name=path.stem,
            x_train=_as_images(file["x_train"], 255),
            y_train=file["y_train"].reshape(-1).astype("int32"),
            x_test=_as_images(file["x_test"], 255),
            y_test=file["y_test"].reshape(-1).astype("int32"),
        )


def _as_images(pixels: np.ndarray, maximum: int) -> np.ndarray:
    images = pixels.astype("float32") / maximum
    return images[..., None] if images.ndim == 3 else images
