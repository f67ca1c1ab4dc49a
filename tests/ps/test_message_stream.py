"""Messages over a real Flight stream: in record batches, and through shared memory."""

import json
import os
import socket

import msgspec
import numpy as np
import pytest

from replicax.ps import message_stream, shared_memory, wire
from replicax.ps.message_stream import CHUNK_BYTES, MessageStream
from replicax.ps.partition import VariableGroup, VariableShard
from replicax.ps.shared_memory import Offer, SharedMemory
from replicax.ps.wire import WireError, announced

pa = pytest.importorskip("pyarrow")


SHARED = pytest.param(
    True,
    id="shared",
    marks=pytest.mark.skipif(
        not hasattr(os, "memfd_create"), reason="the system has no memory to share"
    ),
)


@pytest.fixture(params=[pytest.param(False, id="batches"), SHARED])
def stream(request):
    """A stream to a server that sends everything back."""
    flight = wire.flight()

    class Mirror(flight.FlightServerBase):
        def do_exchange(self, context, descriptor, reader, writer):
            memory = SharedMemory.accept(descriptor.command or b"")
            assert (memory is not None) == request.param
            there = MessageStream(reader, writer, memory)
            while (header := there.receive_header()) is not None:
                vectors = there.receive_vectors(announced(header, None))
                there.send(header, vectors)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        Mirror(("127.0.0.1", port)),
        flight.FlightClient(("127.0.0.1", port)) as client,
    ):
        memory = SharedMemory.make() if request.param else None
        offer = b"" if memory is None else memory.offer
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(offer))
        here = MessageStream(reader, writer, memory)
        echo(here, {}, {})  # The answer says whether memory is shared.
        assert memory is None or memory.is_agreed
        yield here
        reader.cancel()
        with pytest.raises((pa.ArrowException, OSError), match=r"."):
            writer.close()


def echo(stream, header, vectors):
    stream.send(header, vectors)
    header = stream.receive_header()
    return header, stream.receive_vectors(announced(header, None))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int64", "bool", "float16", "uint8"]
)
@pytest.mark.parametrize("length", [0, 1, 7, CHUNK_BYTES // 4 + 3])
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


def test_received_vectors_are_read_only(stream):
    large = np.ones(CHUNK_BYTES, np.float32)
    _, vectors = echo(stream, {}, {"small": large[:4], "large": large})
    for vector in vectors.values():
        assert not vector.flags.writeable


def test_other_memory_layouts_are_converted(stream):
    values = np.arange(6)
    sent = {"reversed": values[::-1], "big": values.astype(">i4")}
    _, vectors = echo(stream, {}, sent)
    assert vectors["reversed"].tolist() == [5, 4, 3, 2, 1, 0]
    assert vectors["big"].tolist() == [0, 1, 2, 3, 4, 5]
    assert vectors["big"].dtype == np.dtype("<i4")


def test_a_vector_may_come_in_pieces(stream):
    sizes = [5, message_stream._SMALL_BYTES, 0, 7, 7, CHUNK_BYTES + 1, 3]
    pieces = [np.arange(size, dtype=np.int32) + i for i, size in enumerate(sizes)]
    _, vectors = echo(stream, {}, {"a": pieces, "b": [pieces[0]], "c": [pieces[2]]})
    np.testing.assert_array_equal(vectors["a"], np.concatenate(pieces))
    np.testing.assert_array_equal(vectors["b"], pieces[0])
    assert not vectors["c"].size


def test_large_pieces_are_not_copied_and_small_pieces_are_joined():
    large = np.zeros(2 * CHUNK_BYTES - 1, np.uint8)
    small = np.ones(3, np.float32)
    chunks = list(message_stream._chunks([small, small, large, small]))
    assert [len(x) for x in chunks] == [24, CHUNK_BYTES, CHUNK_BYTES - 1, 12]
    for chunk, start in ((chunks[1], 0), (chunks[2], CHUNK_BYTES)):
        batch = message_stream._record_batch(chunk)
        assert batch.column(0).buffers()[1].address == large.ctypes.data + start


def test_a_group_of_ten_thousand_variables_fits_into_a_header():
    parts = tuple(
        VariableShard(
            variable=i,
            path=f"transformer/encoder_layer_{i}/self_attention/query/kernel",
            shape=(1024, 16, 64),
            dtype="float32",
            server=i % 2,
            rows=(0, 1024),
        )
        for i in range(10_000)
    )
    group = VariableGroup(name="optimizer 0", rule={"kind": "add"}, shards=parts)
    sent = json.dumps({"op": "create", "group": group.to_json()}).encode()
    assert 1 << 20 < len(sent) < wire.HEADER_BYTES
    assert VariableGroup.from_json(wire.read_json(sent)["group"]) == group


def test_a_header_that_is_too_large_is_not_sent(stream):
    with pytest.raises(WireError, match=f"may have {wire.HEADER_BYTES}"):
        stream.send({"text": "x" * wire.HEADER_BYTES}, {})


@pytest.mark.parametrize("capacity", [None, 1000])
def test_messages_too_large_for_the_memory_go_over_the_stream(
    stream, monkeypatch, capacity
):
    if capacity is not None:
        monkeypatch.setattr(shared_memory, "_CAPACITY_BYTES", capacity)
    sent = np.arange(2 * CHUNK_BYTES // 4 + 1, dtype=np.int32)
    _, vectors = echo(stream, {}, {"a": sent, "b": sent[:3]})
    np.testing.assert_array_equal(vectors["a"], sent)
    np.testing.assert_array_equal(vectors["b"], sent[:3])


@pytest.mark.parametrize("stream", [SHARED], indirect=True)
def test_large_vectors_do_not_travel_on_the_stream(stream):
    """What goes through shared memory does not go through the socket."""
    written = []
    stream.writer = _Recorder(stream.writer, written)
    echo(stream, {}, {"a": np.zeros(CHUNK_BYTES, np.float32)})
    assert max(map(len, written)) < 200


class _Recorder:
    """A writer that keeps what it was given; it has no record batches."""

    def __init__(self, writer, written):
        self._writer, self._written = writer, written

    def write_metadata(self, text):
        self._written.append(text)
        self._writer.write_metadata(text)

    def close(self):
        self._writer.close()


@pytest.mark.parametrize("stream", [SHARED], indirect=True)
def test_more_bytes_than_the_memory_has_are_refused(stream):
    size = shared_memory._CAPACITY_BYTES + 1
    header = {"vectors": [["a", "uint8", size]], "shared": True}
    stream.writer.write_metadata(json.dumps(header).encode())
    with pytest.raises(pa.ArrowException, match="do not fit into the shared memory"):
        stream.receive_header()


@pytest.mark.parametrize("stream", [False], indirect=True)
def test_memory_that_is_not_shared_cannot_be_used(stream):
    stream.writer.write_metadata(b'{"vectors": [["a", "uint8", 9]], "shared": true}')
    with pytest.raises(pa.ArrowException, match="no memory is shared here"):
        stream.receive_header()


def offer_of(file, nonce="00" * 32):
    return msgspec.json.encode(Offer(os.getpid(), file.fileno(), nonce))


@pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="the system has no memory to share"
)
def test_offers_of_other_files_are_not_accepted(tmp_path):
    memory = SharedMemory.make()
    offer = msgspec.json.decode(memory.offer, type=Offer)
    assert SharedMemory.accept(memory.offer) is not None
    for other in (
        *(b"", b"{}", b"\xff", b'{"pid": "../..", "descriptor": 1, "nonce": ""}'),
        # As on another machine, where a process of that number has another file.
        msgspec.json.encode(msgspec.structs.replace(offer, nonce="00" * 32)),
        msgspec.json.encode(msgspec.structs.replace(offer, pid=2**31 - 1)),
    ):
        assert SharedMemory.accept(other) is None
    size = os.fstat(offer.descriptor).st_size
    ordinary = tmp_path / "file"
    ordinary.write_bytes(bytes(size))
    with ordinary.open("r+b") as file:
        assert SharedMemory.accept(offer_of(file)) is None
    with open(os.memfd_create("unsealed"), "r+b") as file:
        file.truncate(size)
        assert SharedMemory.accept(offer_of(file)) is None
    reading, writing = os.pipe()
    with open(reading, "rb") as file, open(writing, "wb"):
        assert SharedMemory.accept(offer_of(file)) is None
    memory.close()
    assert SharedMemory.accept(memory.offer) is None


@pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="the system has no memory to share"
)
def test_shared_memory_cannot_be_cut_off():
    memory = SharedMemory.make()
    file = msgspec.json.decode(memory.offer, type=Offer).descriptor
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    memory.close()
    memory.close()
