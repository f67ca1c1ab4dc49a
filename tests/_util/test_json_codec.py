"""Values as JSON: what checkpoints, closures and feature columns write alike.

Trees and arrays of all kinds are drawn in `tests/ps/test_payloads.py`.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from replicax._util import json_codec, random_state
from replicax._util.json_codec import MARK


def sent(value, **options):
    text = json.dumps(json_codec.encode(value, "it", **options), allow_nan=False)
    return json.loads(text)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.arange(3, dtype=">i4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.asarray(jnp.arange(3, dtype="bfloat16")),
    ],
)
def test_arrays(array):
    back = json_codec.decode(sent(array))
    assert back.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(back, array)


def test_further_types():
    def extend(value, what):
        return {MARK: "set", "v": sorted(value)} if isinstance(value, set) else None

    value = {"x": [{3, 1}, (2.0,)]}
    text = sent(value, extend=extend)
    assert json_codec.decode(text, lambda sent: set(sent["v"])) == value
    with pytest.raises(ValueError, match=r"no encoded value: .*set"):
        json_codec.decode(text)
    with pytest.raises(TypeError, match=r"it\['x'\]\[0\] is of type 'set'"):
        sent(value)


def test_what_is_refused():
    with pytest.raises(TypeError, match="it is an array of dtype object"):
        sent(np.array([None]))
    with pytest.raises(ValueError, match="OBJECT array"):
        json_codec.decode({MARK: "array", "dtype": "object", "shape": [1], "v": ""})


def test_a_random_state_comes_back():
    state = random_state.capture()
    name, drawn = random_state.fingerprint(), np.random.rand(3).tolist()
    assert random_state.fingerprint() != name
    random_state.restore(json_codec.decode(sent(state)))
    assert random_state.fingerprint() == name
    assert np.random.rand(3).tolist() == drawn
    random_state.restore(state)
    assert random_state.fingerprint() == name
