"""All formats of files: shuffled and sharded alike."""

import pickle
import struct
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet as pq

import replicax as rx
import replicax.testing
from replicax._private.grain import parents_of
from replicax.input.crc32c import crc32c
from replicax.input.tf_example import example_class

NUM_ROWS = 13
PARTS = (range(8), range(8, NUM_ROWS))


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def record(**numbers: int) -> bytes:
    example = example_class()()
    for key, number in numbers.items():
        feature = example.features.feature.add(key=key).value
        feature.int64_list.value.append(number)
    data = example.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def tf_records(folder: Path) -> Any:
    for part in PARTS:
        (folder / f"{part.start}.tfrecord").write_bytes(
            b"".join(record(n=number) for number in part)
        )
    dataset = rx.input.tf_records(folder / "*.tfrecord", {"n": "int64"})
    return dataset.map(lambda row: row["n"])


def text_lines(folder: Path) -> Any:
    for part in PARTS:
        (folder / f"{part.start}.txt").write_text("\n".join(map(str, part)))
    return rx.input.text_lines([folder / "0.txt", folder / "8.txt"]).map(np.int64)


def csv(folder: Path) -> Any:
    for part in PARTS:
        text = "".join(f"{number},{2 * number}\n" for number in part)
        (folder / f"{part.start}.csv").write_text("n,m\n" + text)
    return rx.input.csv(folder / "*.csv", label="n").map(lambda pair: pair[1])


def parquet(folder: Path) -> Any:
    for part in PARTS:
        table = pa.table({"n": list(part)})
        pq.write_table(table, folder / f"{part.start}.parquet", row_group_size=3)
    return rx.input.parquet(folder / "*.parquet").map(lambda row: row["n"])


def image_folder(folder: Path) -> Any:
    for part in PARTS:
        (folder / f"class {part.start}").mkdir()
        for number in part:
            image = Image.new("L", (6, 5), number)
            image.save(folder / f"class {part.start}" / f"{number:02}.png")
    dataset = rx.input.image_folder(folder, (2, 3), channels=1)
    return dataset.map(lambda pair: pair[0][0, 0, 0])


def audio_folder(folder: Path) -> Any:
    for number in range(NUM_ROWS):
        with wave.open(str(folder / f"{number:02}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(np.array([number], "<i2").tobytes())
    dataset = rx.input.audio_folder(folder, 4, sample_rate=8000)
    return dataset.map(lambda samples: np.int64(samples[0, 0] * 2**15))


FORMATS = {
    function.__name__: function
    for function in (tf_records, text_lines, csv, parquet, image_folder, audio_folder)
}


def rows(strategy: rx.Strategy, batches: Any) -> list[int]:
    """Return this process' rows, in order and without copies."""
    return [
        int(row)
        for batch in batches
        for part in strategy.experimental_local_results(batch)
        for row in np.asarray(part)
    ]


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_each_epoch_has_every_row_once_in_its_order(make, tmp_path):
    dataset = make(tmp_path)
    assert [int(row) for row in dataset] == list(range(NUM_ROWS))
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(3)])
    shuffled = dataset.shuffle(seed=0)
    data = strategy.experimental_distribute_dataset(shuffled.batch(5))
    epochs = [rows(strategy, data) for _ in range(3)]
    expected = np.reshape(list(shuffled.repeat(3)), (3, NUM_ROWS))
    assert epochs == expected.tolist()
    assert len(set(map(tuple, epochs))) == 3
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)


def sources(folder: Path) -> dict[str, Any]:
    """Make a dataset of each format, in a folder of its own."""
    made = {}
    for name, make in FORMATS.items():
        (folder / name).mkdir()
        made[name] = make(folder / name)
    return made


def test_sources_go_to_worker_processes(tmp_path):
    for name, dataset in sources(tmp_path).items():
        (source,) = parents_of(dataset)
        copied = pickle.loads(pickle.dumps(source))
        np.testing.assert_equal(copied[NUM_ROWS - 1], source[NUM_ROWS - 1], name)


def shards() -> dict[str, list[list[int]]]:
    strategy = rx.MultiWorkerMirroredStrategy()
    return {
        name: [
            rows(strategy, [batch])
            for batch in strategy.experimental_distribute_dataset(
                dataset.shuffle(seed=3).batch(4)
            )
        ]
        for name, dataset in sources(Path(tempfile.mkdtemp())).items()
    }


@pytest.mark.multiprocess
def test_two_workers_share_the_rows_of_each_batch(tmp_path):
    results = replicax.testing.run(
        shards, num_workers=2, logical_devices=2, deadline_seconds=120
    )
    workers = list(results.returned.values())
    for name, dataset in sources(tmp_path).items():
        steps = list(zip(*(worker[name] for worker in workers), strict=True))
        order = [int(row) for row in dataset.shuffle(seed=3)]
        batches = [order[start : start + 4] for start in range(0, NUM_ROWS, 4)]
        assert [[*first, *second] for first, second in steps] == batches, name
