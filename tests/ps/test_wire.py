"""Headers and announcements of vectors, and which of them are refused."""

import ml_dtypes
import pytest

from replicax.ps import wire
from replicax.ps.wire import WireError, announced, exactly


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\x00", "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (wire.HEADER_BYTES + 1), "the JSON has 4194305 bytes"),
    ],
)
def test_invalid_headers_are_refused(data, why):
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
def test_other_announcements_are_refused(vectors, why):
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


def test_unlisted_dtypes_are_refused():
    for name in ("object", "O", "V8", "datetime64", "__class__", ""):
        with pytest.raises(WireError, match="is no dtype"):
            wire.dtype_named(name)
