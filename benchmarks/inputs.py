"""Files as input: rows per second and time to the first batch, beside peers.

`python benchmarks/inputs.py --peers PYTHON` prints a table. `PYTHON` is the interpreter
of an environment with tensorflow-cpu, torch and pandas. Each measurement is a process
of its own on the same cores: three starts each, in turn; the table has medians, and the
least and the largest value.
"""

import argparse
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

BATCH, SIZE, NUM_COLUMNS = 64, (160, 160), 28


def replicax(kind: str, folder: Path) -> Callable[[], Iterator[tuple]]:
    import io

    from PIL import Image

    import replicax as rx

    def decode(row: dict) -> tuple:
        with Image.open(io.BytesIO(row["image"])) as image:
            pixels = image.convert("RGB").resize(SIZE, Image.Resampling.BILINEAR)
        return np.asarray(pixels), row["label"]

    if kind == "images":
        dataset = rx.input.image_folder(folder / "images", SIZE)
    elif kind == "tfrecord":
        features = {"image": bytes, "label": "int64"}
        dataset = rx.input.tf_records(folder / "*.tfrecord", features).map(decode)
    else:
        dataset = rx.input.csv(folder / "rows.csv", label="y", stacked=True)
    dataset = dataset.shuffle(seed=0).batch(BATCH)
    return lambda: rx.input.batches(dataset)


def tensorflow(kind: str, folder: Path) -> Callable[[], Iterator[tuple]]:
    import tensorflow as tf

    def pixels(data: object) -> object:
        image = tf.image.resize(tf.io.decode_jpeg(data, channels=3), SIZE)
        return tf.cast(image, tf.uint8)

    def parsed(record: object) -> tuple:
        row = tf.io.parse_single_example(
            record,
            {
                "image": tf.io.FixedLenFeature([], tf.string),
                "label": tf.io.FixedLenFeature([], tf.int64),
            },
        )
        return pixels(row["image"]), row["label"]

    if kind == "csv":
        dataset = tf.data.experimental.make_csv_dataset(
            str(folder / "rows.csv"), BATCH, label_name="y", num_epochs=1
        )
        dataset = dataset.map(lambda row, y: (tf.stack(list(row.values()), 1), y))
        return dataset.prefetch(tf.data.AUTOTUNE).as_numpy_iterator
    if kind == "images":
        files = sorted((folder / "images").glob("*/*.jpg"))
        labels = [int(file.parent.name) for file in files]
        data = tf.data.Dataset.from_tensor_slices((list(map(str, files)), labels))
        data = data.shuffle(len(files)).map(
            lambda file, label: (pixels(tf.io.read_file(file)), label),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    else:
        data = tf.data.TFRecordDataset(str(folder / "rows.tfrecord"))
        data = data.shuffle(1024).map(parsed, num_parallel_calls=tf.data.AUTOTUNE)
    return data.batch(BATCH).prefetch(tf.data.AUTOTUNE).as_numpy_iterator


def torch(kind: str, folder: Path) -> Callable[[], Iterator[tuple]]:
    import os

    import pandas
    import torch
    from PIL import Image

    class Images(torch.utils.data.Dataset):
        files = sorted((folder / "images").glob("*/*.jpg"))

        def __len__(self) -> int:
            return len(self.files)

        def __getitem__(self, index: int) -> tuple:
            file = self.files[index]
            with Image.open(file) as image:
                pixels = image.convert("RGB").resize(SIZE, Image.Resampling.BILINEAR)
            return torch.from_numpy(np.array(pixels)), int(file.parent.name)

    if kind == "images":
        dataset = Images()
    else:
        rows = pandas.read_csv(folder / "rows.csv").to_numpy("float32")
        x, y = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, -1])
        dataset = torch.utils.data.TensorDataset(x, y)
    workers = len(os.sched_getaffinity(0))
    loader = torch.utils.data.DataLoader(
        dataset, BATCH, shuffle=True, num_workers=workers
    )
    return lambda: iter(loader)


SYSTEMS = {"replicax": replicax, "tensorflow": tensorflow, "torch": torch}
CASES = [
    *[(system, "images") for system in SYSTEMS],
    *[(system, "tfrecord") for system in ("replicax", "tensorflow")],
    *[(system, "csv") for system in SYSTEMS],
]


def make_files(folder: Path, num_images: int, num_rows: int) -> None:
    """Write crops of scikit-learn's photos as JPEG files, and a table of numbers."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    from replicax.input.crc32c import crc32c
    from replicax.input.tf_example import example_class

    def masked(data: bytes) -> bytes:
        crc = crc32c(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)

    rng = np.random.default_rng(0)
    photos = load_sample_images().images
    with open(folder / "rows.tfrecord", "wb") as records:
        for index in range(num_images):
            label = index % len(photos)
            top, left = rng.integers(0, (100, 200))
            crop = photos[label][top : top + 320, left : left + 400]
            (folder / "images" / str(label)).mkdir(parents=True, exist_ok=True)
            file = folder / "images" / str(label) / f"{index:05}.jpg"
            Image.fromarray(crop).save(file, quality=90)
            example = example_class()()
            add = example.features.feature.add
            add(key="image").value.bytes_list.value.append(file.read_bytes())
            add(key="label").value.int64_list.value.append(label)
            data = example.SerializeToString()
            length = struct.pack("<Q", len(data))
            records.write(length + masked(length) + data + masked(data))
    values = rng.normal(size=(num_rows, NUM_COLUMNS)).astype("float32")
    labels = rng.integers(0, 2, (num_rows, 1))
    header = ",".join([*(f"x{i}" for i in range(NUM_COLUMNS)), "y"])
    formats = ["%.6g"] * NUM_COLUMNS + ["%d"]
    rows = np.concatenate([values, labels], 1)
    np.savetxt(folder / "rows.csv", rows, formats, ",", header=header, comments="")


def measure(system: str, kind: str, folder: Path) -> dict[str, float]:
    """Return the seconds to the first batch, and the second epoch's rows per second."""
    if system == "replicax":
        import grain  # noqa: F401  # The time is without the imports.
    __import__(system)
    start = time.perf_counter()
    epoch = SYSTEMS[system](kind, folder)
    iterator = epoch()
    next(iterator)
    first = time.perf_counter() - start
    num_first = BATCH + sum(len(labels) for _, labels in iterator)
    start = time.perf_counter()
    num_rows = sum(len(labels) for _, labels in epoch())
    assert num_rows == num_first
    return {
        "first": first,
        "rate": num_rows / (time.perf_counter() - start),
        "rows": num_rows,
    }


def spread(values: list[float], digits: int) -> str:
    median = statistics.median(values)
    return f"{median:,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", help="Python with tensorflow-cpu, torch and pandas")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        system, kind, folder = arguments.case
        print(json.dumps(measure(system, kind, Path(folder))))
        return
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder), arguments.images, arguments.rows)
        for _ in range(arguments.starts):
            for system, kind in CASES:
                python = sys.executable if system == "replicax" else arguments.peers
                if python is None:
                    continue
                output = subprocess.run(
                    [python, __file__, "--case", system, kind, folder],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
                result = json.loads(output.splitlines()[-1])
                expected = arguments.rows if kind == "csv" else arguments.images
                assert result["rows"] == expected, (system, kind, result)
                results.setdefault((kind, system), []).append(result)
    print("| files | library | rows per second | first batch, seconds |")
    print("|---|---|---|---|")
    for (kind, system), measured in results.items():
        rates = spread([x["rate"] for x in measured], 0)
        firsts = spread([x["first"] for x in measured], 2)
        print(f"| {kind} | {system} | {rates} | {firsts} |")


if __name__ == "__main__":
    main()
