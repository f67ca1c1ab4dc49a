"""Messages over a real Flight stream, and announcements that must be refused."""

import socket

import ml_dtypes
import numpy as np
import pytest

from replicax.ps import wire
from replicax.ps.partition import VariableGroup, VariableSlice
from replicax.ps.wire import WireError, announced, exactly

pa = pytest.importorskip("pyarrow")


@pytest.fixture
def stream():
    """`(writer, reader)` of a stream to a server that sends everything back."""
    flight = wire.flight()

    class Mirror(flight.FlightServerBase):
        def do_exchange(self, context, descriptor, reader, writer):
            wire.begin(writer)
            while (header := wire.receive_header(reader)) is not None:
                vectors = wire.receive_vectors(reader, announced(header, None))
                wire.send(writer, header, vectors)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        Mirror(("127.0.0.1", port)),
        flight.FlightClient(("127.0.0.1", port)) as client,
    ):
        descriptor = flight.FlightDescriptor.for_path("x")
        writer, reader = client.do_exchange(descriptor)
        wire.begin(writer)
        yield writer, reader
        reader.cancel()
        with pytest.raises((pa.ArrowException, OSError), match=r"."):
            writer.close()


def echo(stream, header, vectors):
    writer, reader = stream
    wire.send(writer, header, vectors)
    header = wire.receive_header(reader)
    return header, wire.receive_vectors(reader, announced(header, None))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int64", "bool", "float16", "uint8"]
)
@pytest.mark.parametrize("length", [0, 1, 7, wire.CHUNK_BYTES // 4 + 3])
def test_vectors_arrive_as_they_were_sent(stream, dtype, length):
    rng = np.random.default_rng(0)
    sent = rng.integers(0, 2, length).astype(wire.dtype_named(dtype))
    header, vectors = echo(stream, {"op": "x", "number": 7}, {"a": sent, "b": sent[:1]})
    assert header["op"] == "x"
    assert header["number"] == 7
    assert list(vectors) == ["a", "b"]
    assert vectors["a"].dtype == sent.dtype
    np.testing.assert_array_equal(vectors["a"], sent)
    np.testing.assert_array_equal(vectors["b"], sent[:1])


def test_what_was_received_cannot_be_written_to(stream):
    large = np.ones(wire.CHUNK_BYTES, np.float32)
    _, vectors = echo(stream, {}, {"small": large[:4], "large": large})
    for vector in vectors.values():
        assert not vector.flags.writeable


def test_other_layouts_are_sent_as_what_they_mean(stream):
    values = np.arange(6)
    sent = {"reversed": values[::-1], "big": values.astype(">i4")}
    _, vectors = echo(stream, {}, sent)
    assert vectors["reversed"].tolist() == [5, 4, 3, 2, 1, 0]
    assert vectors["big"].tolist() == [0, 1, 2, 3, 4, 5]
    assert vectors["big"].dtype == np.dtype("<i4")


def test_a_sender_copies_nothing():
    values = np.zeros(3 * wire.CHUNK_BYTES - 1, np.uint8)
    batches = [wire._record_batch(chunk) for chunk in wire._chunks([values])]
    assert len(batches) == 3
    start = values.ctypes.data
    assert [b.column(0).buffers()[1].address - start for b in batches] == [
        i * wire.CHUNK_BYTES for i in range(len(batches))
    ]


def test_a_vector_may_come_in_pieces(stream):
    sizes = [5, wire._SMALL_BYTES, 0, 7, 7, wire.CHUNK_BYTES + 1, 3]
    pieces = [np.arange(size, dtype=np.int32) + i for i, size in enumerate(sizes)]
    _, vectors = echo(stream, {}, {"a": pieces, "b": [pieces[0]], "c": [pieces[2]]})
    np.testing.assert_array_equal(vectors["a"], np.concatenate(pieces))
    np.testing.assert_array_equal(vectors["b"], pieces[0])
    assert not vectors["c"].size


def test_large_pieces_are_not_copied_and_small_ones_travel_together():
    large = np.zeros(wire.CHUNK_BYTES, np.uint8)
    small = np.ones(3, np.float32)
    chunks = list(wire._chunks([small, small, large, small]))
    assert [len(chunk) for chunk in chunks] == [24, len(large), 12]
    assert np.shares_memory(chunks[1], large)


def test_a_group_of_ten_thousand_variables_fits_into_a_header():
    parts = tuple(
        VariableSlice(
            variable=i,
            path=f"transformer/encoder_layer_{i}/self_attention/query/kernel",
            shape=(1024, 16, 64),
            dtype="float32",
            server=i % 2,
            rows=(0, 1024),
        )
        for i in range(10_000)
    )
    group = VariableGroup(name="optimizer 0", rule={"kind": "add"}, parts=parts)
    written = []

    class Writer:
        def write_metadata(self, data):
            written.append(data)

    wire.send(Writer(), {"op": "create", "group": group.to_json()}, {})
    assert 1 << 20 < len(written[0]) < wire.HEADER_BYTES
    assert VariableGroup.from_json(wire.read_json(written[0])["group"]) == group


def test_a_header_that_is_too_large_is_not_sent(stream):
    with pytest.raises(WireError, match=f"may have {wire.HEADER_BYTES}"):
        wire.send(stream[0], {"text": "x" * wire.HEADER_BYTES}, {})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\x00", "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (wire.HEADER_BYTES + 1), "the JSON has 4194305 bytes"),
    ],
)
def test_what_is_no_header_is_refused(data, why):
    with pytest.raises(WireError, match=why):
        wire.read_json(data)


@pytest.mark.parametrize(
    ("vectors", "why"),
    [
        (None, "expected a list of"),
        ([["float32", "float32"]], "expected a list of"),
        ([["float32", "float32", -1]], "expected a list of"),
        ([["float32", "float32", True]], "expected a list of"),
        ([["float32", "float32", 1.5]], "expected a list of"),
        ([], r"has the vectors \[\]; expected \['float32'\]"),
        ([["float32", "float32", 10]] * 2, "has the vectors"),
        ([["other", "float32", 10]], "has the vectors"),
        ([["float32", "float64", 10]], "dtype 'float64'; expected one of"),
        ([["float32", "object", 10]], "dtype 'object'; expected one of"),
        ([["float32", "float32", 9]], "has 9 elements; expected 10"),
        ([["float32", "float32", 1 << 29]], "has 536870912 elements; expected 10"),
    ],
)
def test_an_announcement_of_anything_else_is_refused(vectors, why):
    allowed = exactly({"float32": 10}, "bfloat16")
    with pytest.raises(WireError, match=why):
        announced({"vectors": vectors}, allowed)


def test_compressed_gradients_may_be_announced_for_floats_only():
    header = {"vectors": [["float32", "bfloat16", 10]]}
    [(name, dtype, length)] = announced(header, exactly({"float32": 10}, "bfloat16"))
    assert (name, dtype, length) == ("float32", ml_dtypes.bfloat16, 10)
    with pytest.raises(WireError, match="bfloat16"):
        announced(
            {"vectors": [["int32", "bfloat16", 10]]},
            exactly({"int32": 10}, "bfloat16"),
        )


def test_no_dtype_but_the_listed_ones_has_a_name():
    for name in ("object", "O", "V8", "datetime64", "__class__", ""):
        with pytest.raises(WireError, match="is no dtype"):
            wire.dtype_named(name)
