"""Grain datasets of folders of files, whose subfolders are the classes."""

import functools
import os
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from replicax._util.listing import listed
from replicax.errors import InputError
from replicax.input.files import require_package

if TYPE_CHECKING:
    import grain

__all__ = ["audio_folder", "folder", "image_folder"]

T_co = TypeVar("T_co", covariant=True)

_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def folder(
    path: str | os.PathLike[str],
    decode: Callable[[str], T_co],
    suffixes: Sequence[str],
    *,
    class_names: Sequence[str] | None = None,
) -> "grain.MapDataset[Any]":
    """Make a Grain dataset of the files in a folder; each subfolder is a class.

    Args:
        path: The folder.
        decode: Gets a file's path, and returns its value. Worker processes of Grain
            need a function of a module.
        suffixes: The files' suffixes, such as `[".npy"]`; other files are ignored.
        class_names: The subfolders to read, in the order of their labels. None: all
            subfolders, sorted by name.

    Returns:
        A `grain.MapDataset` of pairs `(value, label)`, the label an `int32`. Of values
        if the folder has no subfolders.

    Raises:
        FileNotFoundError: If there is no such folder, subfolder or file.
        InputError: While reading, if `decode` raises an `OSError` or `ValueError`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog"):
        ...     (path / name).mkdir()
        ...     np.save(path / name / "0.npy", np.ones(2))
        >>> [(x.tolist(), int(label)) for x, label in folder(path, np.load, [".npy"])]
        [([1.0, 1.0], 0), ([1.0, 1.0], 1)]
    """
    import grain  # A late import: it takes long.

    root = Path(path)
    subfolders = sorted(
        x.name for x in root.iterdir() if x.is_dir() and not x.name.startswith(".")
    )
    names = subfolders if class_names is None else list(class_names)
    if absent := sorted(set(names) - set(subfolders)):
        raise FileNotFoundError(
            f"{root} has no subfolder {absent[0]!r} of class_names; its subfolders are "
            f"{listed(subfolders, nobody='none')}."
        )
    files, labels = [], []
    for label, name in enumerate(names or [""]):
        in_class = sorted(
            str(file)
            for file in (root / name).rglob("*")
            if file.suffix.lower() in suffixes and file.is_file()
        )
        if not in_class:
            raise FileNotFoundError(
                f"{root / name} has no file {listed(suffixes, last=' or ')}. Remove "
                "the folder, or name the classes: class_names=[...]."
            )
        files += in_class
        labels += [label] * len(in_class)
    return grain.MapDataset.source(
        _Files(files, np.array(labels, "int32") if names else None, decode)
    )


def image_folder(
    path: str | os.PathLike[str],
    size: tuple[int, int],
    *,
    channels: int = 3,
    class_names: Sequence[str] | None = None,
) -> "grain.MapDataset[Any]":
    """Make a Grain dataset of the images in a folder; each subfolder is a class.

    Decodes and resizes with Pillow.

    Args:
        path: A folder with a subfolder of BMP, GIF, JPEG and PNG files for each class.
        size: Height and width `(H, W)` of the images; others are resized, bilinearly
            and without keeping the aspect ratio.
        channels: 1 for gray images, 3 for RGB, 4 for RGBA.
        class_names: See `folder`.

    Returns:
        A `grain.MapDataset` of pairs of an image, `uint8[H, W, channels]` from 0 to
        255, and its label, `int32`. Of images if the folder has no subfolders.

    Raises:
        FileNotFoundError: If there is no such folder, subfolder or file.
        ImportError: If Pillow is not installed.
        InputError: While reading, if a file is damaged, or has more than 8 bits per
            channel.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> path = Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog"):
        ...     (path / name).mkdir()
        ...     Image.new("RGB", (8, 6)).save(path / name / "0.png")
        >>> [(x.shape, int(label)) for x, label in image_folder(path, (4, 4))]
        [((4, 4, 3), 0), ((4, 4, 3), 1)]
    """
    require_package("PIL", "image_folder")
    if channels not in _MODES:
        raise ValueError(f"image_folder: got channels={channels}, expected 1, 3 or 4.")
    decode = functools.partial(_image, size=size, mode=_MODES[channels])
    return folder(path, decode, _IMAGES, class_names=class_names)


def audio_folder(
    path: str | os.PathLike[str],
    num_samples: int,
    *,
    sample_rate: int,
    channels: int = 1,
    class_names: Sequence[str] | None = None,
) -> "grain.MapDataset[Any]":
    """Make a Grain dataset of the WAV files in a folder; each subfolder is a class.

    Args:
        path: A folder with a subfolder of WAV files (PCM) for each class.
        num_samples: Longer recordings are cut to this number `N`, shorter ones are
            padded with 0.
        sample_rate: The files' samples per second; other files are refused.
        channels: The files' number of channels; other files are refused.
        class_names: See `folder`.

    Returns:
        A `grain.MapDataset` of pairs of samples, `float32[N, channels]` from -1 to 1,
        and a label, `int32`. Of samples if the folder has no subfolders.

    Raises:
        FileNotFoundError: If there is no such folder, subfolder or file.
        InputError: While reading, if a file is damaged, or has another sample rate or
            number of channels.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> with wave.open(str(path / "beep.wav"), "wb") as file:
        ...     file.setparams((1, 2, 8000, 0, "NONE", ""))
        ...     file.writeframes(np.array([0, 16384], "<i2").tobytes())
        >>> [x.ravel().tolist() for x in audio_folder(path, 3, sample_rate=8000)]
        [[0.0, 0.5, 0.0]]
    """
    expected = (channels, sample_rate)
    decode = functools.partial(_audio, num_samples=num_samples, expected=expected)
    return folder(path, decode, [".wav"], class_names=class_names)


class _Files(Generic[T_co]):
    """A random-access source for Grain, whose checkpoints contain its `repr`."""

    def __init__(
        self,
        files: Sequence[str],
        labels: np.ndarray | None,
        decode: Callable[[str], T_co],
    ) -> None:
        self._files = files
        self._labels = labels
        self._decode = decode

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> T_co | tuple[T_co, np.int32]:
        file = self._files[index]
        try:
            value = self._decode(file)
        except (OSError, ValueError, EOFError, wave.Error) as error:
            raise InputError(
                f"cannot read {file}: {error}. Repair, convert or remove the file."
            ) from error
        return value if self._labels is None else (value, self._labels[index])

    def __repr__(self) -> str:
        return f"folder({len(self)} files, {self._files[0]} the first)"


def _image(file: str, size: tuple[int, int], mode: str) -> np.ndarray:
    from PIL import Image

    height, width = size
    with Image.open(file) as image:
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"it has mode {image.mode}, expected 8 bits per channel")
        # The decoder of JPEG files may halve the size, but not to less than this.
        image.draft(mode, (2 * width, 2 * height))
        pixels = image.convert(mode).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(pixels).reshape(height, width, -1)


def _audio(file: str, num_samples: int, expected: tuple[int, int]) -> np.ndarray:
    with wave.open(file, "rb") as opened:
        actual = (opened.getnchannels(), opened.getframerate())
        num_bytes = opened.getsampwidth()
        data = opened.readframes(num_samples)
        expected_size = min(num_samples, opened.getnframes()) * num_bytes * actual[0]
    if actual != expected:
        raise ValueError(
            f"it has {actual[0]} channels and {actual[1]} samples per second, expected "
            f"{expected[0]} and {expected[1]}"
        )
    if len(data) != expected_size:  # `wave` raises nothing.
        raise ValueError(f"it is cut short: {len(data)} bytes of {expected_size}")
    # The bytes of a sample become the highest ones of an int32.
    parts = np.frombuffer(data, "uint8").reshape(-1, num_bytes)
    wide = np.zeros((len(parts), 4), "uint8")
    wide[:, 4 - num_bytes :] = parts ^ 128 if num_bytes == 1 else parts
    samples = wide.view("<i4").astype("float32").reshape(-1, expected[0]) / 2**31
    padding = num_samples - len(samples)
    return np.pad(samples, [(0, padding), (0, 0)])
