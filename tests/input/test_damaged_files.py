"""What each format reads exactly, and files that are refused by name."""

import base64
import gzip
import os
import wave
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet as pq

import replicax as rx
from replicax.input import crc32c

# Written by TensorFlow 2.21: three examples, then bytes that are none.
BY_TENSORFLOW = base64.b64decode(
    "gwAAAAAAAACzsZHpCoABCh8KA2lkcxIYGhYKFAGAgICAgICAgIAB//////////9/ChQKAmlkEg4aDAoK/"
    "///////////AQoSCgVpbWFnZRIJCgcKBQD/YWJjCh4KBnBpeGVscxIUEhIKEAAAAD8AAMC/F3YXcgAAAAA"
    "KEwoEdGFncxILCgkKAWEKAAoCY2MiWpvOVgAAAAAAAABOLeKyClQKCQoDaWRzEgIaAAoMCgJpZBIGGgQKA"
    "qwCCg0KBWltYWdlEgQKAgoACh4KBnBpeGVscxIUEhIKEAAAgD8AAABAAABAQAAAgEAKCgoEdGFncxICCgC"
    "q/bRIqwAAAAAAAACFQwsoCqgBCgsKAmlkEgUaAwoBBwpdCgVpbWFnZRJUClIKUAABAgMEBQYHCAkKCwwND"
    "g8QERITFBUWFxgZGhscHR4fICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj9AQUJDREVGR0hJSkt"
    "MTU5PCh4KBnBpeGVscxIUEhIKEAAAAAAAAAAAAAAAAAAAAAAKCAoEdGFncxIAChAKB3Vua25vd24SBRoDC"
    "gEBs7GllxAAAAAAAAAAlfv+GG5vdCBhbiBleGFtcGxlIP9iAg51"
)
FEATURES: dict[str, Any] = {
    "id": "int16",
    "image": bytes,
    "pixels": ("float32", (2, 2)),
    "tags": (bytes, (-1,)),
    "ids": ("int64", (-1,)),
}


@pytest.fixture
def tf_file(tmp_path):
    file = tmp_path / "a.tfrecord"
    file.write_bytes(BY_TENSORFLOW)
    return file


def test_examples_that_tensorflow_wrote(tf_file):
    dataset = rx.input.tf_records(tf_file, FEATURES)
    assert len(dataset) == 4
    first, second, third = (dataset[i] for i in range(3))
    assert [int(row["id"]) for row in (first, second, third)] == [-1, 300, 7]
    assert first["image"] == b"\x00\xffabc"
    assert second["image"] == b""
    assert third["image"] == bytes(range(80))
    pixels = np.array([[0.5, -1.5], [3e30, 0]], "float32")
    np.testing.assert_array_equal(first["pixels"], pixels)
    assert first["pixels"].dtype == "float32"
    assert first["ids"].tolist() == [1, -(2**63), 2**63 - 1]
    assert [row["ids"].tolist() for row in (second, third)] == [[], []]
    tags = [row["tags"].tolist() for row in (first, second, third)]
    assert tags == [[b"a", b"", b"cc"], [], []]
    assert rx.input.tf_records(tf_file)[3] == b"not an example \xff"


@pytest.mark.parametrize("size", [0, 1, 3, 9, 63, 64, 1023, 1024, 1025, 5000])
def test_checksums_of_numpy_are_those_byte_by_byte(size):
    data = np.random.default_rng(size).bytes(size)
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    assert crc32c.by_numpy(data) == crc32c.crc32c(data) == state ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"id": "float32"}, r"'id' has 1 values in int64_list; expected float_list"),
        ({"id": "uint8"}, r"'id' has 1 values in int64_list.*out of bounds"),
        ({"pixels": "float32"}, r"'pixels' has 4 values.*shape \(\)"),
        ({"pixels": ("float32", (3,))}, r"'pixels' has 4 values.*shape \(3,\)"),
        ({"x": bytes}, r"'x' has no value.*features \['id', 'ids', 'image', 'pixels'"),
    ],
)
def test_examples_that_differ_from_their_features(tf_file, features, message):
    dataset = rx.input.tf_records(tf_file, features)
    with pytest.raises(rx.InputError, match=rf"a\.tfrecord, record 1, .*{message}"):
        dataset[0]


def test_bytes_that_are_no_example_and_dtypes_that_no_feature_has(tf_file):
    dataset = rx.input.tf_records(tf_file, FEATURES)
    with pytest.raises(rx.InputError, match=r"record 4, at byte 448, is not a tf\.tr"):
        dataset[3]
    with pytest.raises(TypeError, match="feature 'id' has dtype object; expected"):
        rx.input.tf_records(tf_file, {"id": object})


def flipped(position: int) -> bytes:
    data = bytearray(BY_TENSORFLOW)
    data[position] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (BY_TENSORFLOW[:-1], "record 4, at byte 436, is cut short"),
        (BY_TENSORFLOW[:440], "record 4, at byte 436, is cut short"),
        (flipped(1), "record 1, at byte 0, has a wrong checksum of its length"),
        (flipped(9), "record 1, at byte 0, has a wrong checksum of its length"),
        (gzip.compress(BY_TENSORFLOW), "record 1, at byte 0, .*compressed"),
    ],
)
def test_a_tfrecord_file_that_is_damaged(tmp_path, data, message):
    (tmp_path / "a.tfrecord").write_bytes(data)
    with pytest.raises(rx.InputError, match=rf"a\.tfrecord, {message}"):
        rx.input.tf_records(tmp_path / "a.tfrecord")


@pytest.mark.parametrize("position", [200, 428, 435])
def test_a_record_whose_data_are_damaged(tmp_path, position):
    (tmp_path / "a.tfrecord").write_bytes(flipped(position))
    dataset = rx.input.tf_records(tmp_path / "a.tfrecord", FEATURES)
    index = 1 if position == 200 else 2
    place = f"record {index + 1}, at byte {[159, 261][index - 1]}"
    with pytest.raises(rx.InputError, match=f"{place}, has"):
        dataset[index]
    assert int(dataset[0]["id"]) == -1


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a", ["a"]),
        ("a\r\nb\n\nc", ["a", "b", "", "c"]),
        ("ä\n" * 3, ["ä"] * 3),
    ],
)
def test_lines(tmp_path, monkeypatch, text, lines):
    monkeypatch.setattr("replicax.input.files._SEARCHED_AT_ONCE", 3)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "b.txt").write_text("last", encoding="utf-8")
    assert list(rx.input.text_lines(tmp_path / "*.txt")) == [*lines, "last"]


def test_text_that_is_not_utf8_or_changes(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"ok\n\xff\n")
    dataset = rx.input.text_lines(file)
    assert dataset[0] == "ok"
    with pytest.raises(rx.InputError, match=r"a\.txt, record 2, at byte 3, is not UTF"):
        dataset[1]
    other = rx.input.text_lines(file)
    os.utime(file, ns=(1, 1))
    rx.input.files._contents.cache_clear()
    with pytest.raises(rx.InputError, match=r"a\.txt has changed since"):
        other[0]


@pytest.mark.parametrize("paths", ["none-*.csv", ["absent.csv"], []])
def test_paths_without_a_file(tmp_path, monkeypatch, paths):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(FileNotFoundError, match=r"csv: .*(matches no file|no paths)"):
        rx.input.csv(paths)
    with pytest.raises(FileNotFoundError, match=r"Pass folder\.csv/\*"):
        rx.input.text_lines("folder.csv")


def test_values_of_a_table(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('1;"two; 2"\n-3;"a ""b""\nc"\n;x\n')
    rows = list(
        rx.input.csv(
            file, names=["n", "s"], delimiter=";", missing={"n": 7}, columns=["s", "n"]
        )
    )
    values = [(row["s"], int(row["n"])) for row in rows]
    assert values == [("two; 2", 1), ('a "b"\nc', -3), ("x", 7)]
    (row,) = rx.input.csv(
        text_file(tmp_path, "n,m\n01,2\n"), dtypes={"n": str, "m": "f4"}
    )
    assert row["n"] == "01"
    assert row["m"].dtype == "float32"
    (pair,) = rx.input.csv(text_file(tmp_path, "n,m,y\n1,2.5,3\n"), "y", stacked=True)
    assert [pair[0].tolist(), int(pair[1])] == [[1.0, 2.5], 3]
    assert pair[0].dtype == "float32"


def text_file(folder, text):
    (folder / "table.csv").write_text(text)
    return folder / "table.csv"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,b\n1,2\n3\n", {}, r"Row #3: Expected 2 columns, got 1: 3.*delimiter"),
        ("a,b\n1,2,3\n", {}, r"Row #2: Expected 2 columns, got 3: 1,2,3"),
        ("a\n1\nx\n", {"dtypes": {"a": "int32"}}, r"#0: Row #3: .*'x'.*dtypes"),
        ("a\n1\n", {"columns": ["b"]}, r"no column 'b'; its columns are \['a'\]"),
        ("a\n1\n", {"label": "b"}, r"no column 'b'; its columns are \['a'\]"),
        ("a\n1\n", {"dtypes": {"b": "i4"}}, r"no column 'b'"),
        (
            "a,b\n1,x\n,y\n",
            {},
            r"'a' has 1 missing values, the first in row 2.*miss",
        ),
        ("a,b\n1,x\n", {"stacked": True}, r"column 'b' of object\[\] cannot be stack"),
        ("", {}, r"table\.csv: Empty CSV file"),
    ],
)
def test_tables_that_are_refused(tmp_path, text, options, message):
    with pytest.raises(rx.InputError, match=rf"csv: .*{message}"):
        rx.input.csv(text_file(tmp_path, text), **options)


def test_parquet_files(tmp_path):
    file = tmp_path / "a.parquet"
    lists = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]
    table = pa.table({"x": lists, "uneven": [[1], [2, 3]], "s": ["a", "b"]})
    pq.write_table(table, file)
    rows = list(rx.input.parquet(file))
    np.testing.assert_array_equal([row["x"] for row in rows], lists)
    assert [row["uneven"].tolist() for row in rows] == [[1], [2, 3]]
    assert [row["s"] for row in rows] == ["a", "b"]
    assert list(rx.input.parquet(file, columns=["s"])[0]) == ["s"]
    with pytest.raises(rx.InputError, match=r"a\.parquet has no column 'y'"):
        rx.input.parquet(file, columns=["y"])
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(rx.InputError, match=r"cannot read .*a\.parquet: .*damaged"):
        rx.input.parquet(file)


@pytest.fixture
def pets(tmp_path):
    for name in ("dog", "cat", ".hidden"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 2), (10, 20, 30)).save(tmp_path / name / "a.PNG")
    return tmp_path


def test_labels_and_colours_of_images(pets):
    dataset = rx.input.image_folder(pets, (2, 4))
    assert [int(label) for _, label in dataset] == [0, 1]
    (image, label), _ = dataset
    assert image.dtype == "uint8"
    assert label.dtype == "int32"
    assert image[1, 3].tolist() == [10, 20, 30]
    gray = rx.input.image_folder(pets / "dog", (2, 4), channels=1)[0]
    assert gray.shape == (2, 4, 1)
    dogs = rx.input.image_folder(pets, (1, 1), channels=4, class_names=["dog"])
    ((image, label),) = dogs
    assert image.shape == (1, 1, 4)
    assert label == 0


def test_a_large_jpeg_is_resized_as_without_a_shortcut(tmp_path):
    ramp = np.linspace(0, 255, 512)[:, None] * np.linspace(0, 1, 512)
    image = Image.fromarray(ramp.astype("uint8"))
    image.save(tmp_path / "a.jpg", quality=95)
    (actual,) = rx.input.image_folder(tmp_path, (32, 32), channels=1)
    expected = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))
    assert np.abs(actual[..., 0].astype(int) - expected).max() <= 3


def test_folders_and_images_that_are_refused(pets):
    with pytest.raises(FileNotFoundError, match=r"no subfolder 'cow'.*cat and dog"):
        rx.input.image_folder(pets, (2, 2), class_names=["cat", "cow"])
    with pytest.raises(ValueError, match="got channels=2, expected 1, 3 or 4"):
        rx.input.image_folder(pets, (2, 2), channels=2)
    (pets / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no file .bmp, "):
        rx.input.image_folder(pets, (2, 2))
    (pets / "cat" / "a.PNG").write_bytes(b"not a picture")
    Image.new("I;16", (4, 4)).save(pets / "dog" / "a.PNG")
    dataset = rx.input.image_folder(pets, (2, 2), class_names=["cat", "dog"])
    with pytest.raises(rx.InputError, match=r"cannot read .*cat.a\.PNG: .*Repair"):
        dataset[0]
    with pytest.raises(rx.InputError, match=r"dog.a\.PNG: it has mode I;16, expected"):
        dataset[1]


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_each_width(tmp_path, num_bytes, channels):
    values = np.array([-1.0, 0.5, 0.25, 0.0] * channels).reshape(-1, channels)
    data = np.round(values * 2 ** (8 * num_bytes - 1)).astype("<i4")
    data += 128 * (num_bytes == 1)  # A width of 8 bits has no sign.
    parts = data.view("uint8").reshape(-1, 4)[:, :num_bytes]
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((channels, num_bytes, 16000, 0, "NONE", ""))
        file.writeframes(parts.tobytes())
    for num_samples in (2, 6):
        (samples,) = rx.input.audio_folder(
            tmp_path, num_samples, sample_rate=16000, channels=channels
        )
        expected = np.zeros((num_samples, channels))
        expected[:4] = values[:num_samples]
        np.testing.assert_array_equal(samples, expected)
        assert samples.dtype == "float32"
    dataset = rx.input.audio_folder(tmp_path, 4, sample_rate=8000, channels=channels)
    with pytest.raises(rx.InputError, match=r"a\.wav: it has .* 16000 samples per sec"):
        dataset[0]
    dataset = rx.input.audio_folder(tmp_path, 4, sample_rate=16000, channels=channels)
    whole = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").write_bytes(whole[: -num_bytes * channels])
    with pytest.raises(rx.InputError, match=r"a\.wav: it is cut short"):
        dataset[0]
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(rx.InputError, match=r"cannot read .*a\.wav"):
        dataset[0]
