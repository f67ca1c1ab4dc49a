"""Ported pipelines of image folders, run on folders of images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from replicax_migrate import port

SOURCE = """
import tensorflow as tf

images = tf.keras.utils.image_dataset_from_directory(
    folder, image_size=(4, 4), batch_size=2, seed=0)
images = images.cache().shuffle(100).map(lambda x, y: (x / 255.0, y)){}
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Six images of two classes: black ones and white ones."""
    for name, grey in [("black", 0), ("white", 255)]:
        (tmp_path / name).mkdir()
        for i in range(3):
            image = Image.fromarray(np.full((4, 4, 3), grey, "uint8"))
            image.save(tmp_path / name / f"{i}.png")
    return str(tmp_path)


def batches(folder: str, methods: str) -> list[tuple[np.ndarray, np.ndarray]]:
    ported = port(SOURCE.format(methods).encode())
    assert not ported.left
    names: dict[str, Any] = {"folder": folder}
    exec(compile(ported.source, "ported", "exec"), names)
    return [(np.asarray(x), np.asarray(y)) for x, y in names["images"]]


@pytest.mark.parametrize(
    ("methods", "number"),
    [
        ("", 3),
        (".take(2)", 2),
        (".take(5)", 3),
        (".repeat(2)", 6),
        (".repeat().take(7)", 7),
        (".take(count=1).repeat(count=3)", 3),
        (".prefetch(tf.data.AUTOTUNE)", 3),
    ],
)
def test_batches_are_as_many_as_asked_for(
    folder: str, methods: str, number: int
) -> None:
    found = batches(folder, methods)
    assert len(found) == number
    for images, labels in found:
        assert images.shape == (2, 4, 4, 3)
        np.testing.assert_array_equal(images[:, 0, 0, 0], labels)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("{}(f).skip(1)", "has no `skip`"),
        ("{}(f).shard(2, 0)", "has no `shard`"),
        ("{0}(f).concatenate({0}(g))", "has no `concatenate`"),
        ("{}(f, shuffle=False).shuffle(9)", "pass `shuffle=True`"),
        ("tf.data.Dataset.zip(({0}(f), {0}(g)))", "cannot zip a stream of batches"),
    ],
)
def test_what_a_stream_cannot_do_is_left(script: str, reason: str) -> None:
    call = script.format("tf.keras.utils.image_dataset_from_directory")
    source = f"import tensorflow as tf\nimages = {call}\n"
    ported = port(source.encode())
    assert ported.left
    assert all(reason in finding.reason for finding in ported.left)
    assert call in ported.source.decode()
