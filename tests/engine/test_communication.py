"""What `CommunicationOptions` refuses, and the error of compressed sums."""

from typing import Any

import numpy as np
import pytest
from tests.conftest import mirrored

import replicax as rx


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("bytes_per_pack", value) for value in (-1, 1.5, "1", True, None)),
        ("implementation", "NCCL"),
        *(("compression", value) for value in ("float32", "bf16", True)),
    ],
)
def test_invalid_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* got {value!r}"):
        rx.CommunicationOptions(**{name: value})


def compressed_sum(grads: list[Any], compression: str) -> list[np.ndarray]:
    """Sum arrays `[replicas, ...]` over as many replicas."""
    options = rx.CommunicationOptions(compression=compression)

    def fn(*own: Any) -> Any:
        return rx.get_replica_context().all_reduce("sum", list(own), options)

    strategy = mirrored(len(grads[0]))
    sums = strategy.run(fn, tuple(rx.PerReplica(g) for g in grads))
    return [np.asarray(x) for x in sums]


@pytest.mark.parametrize(("compression", "digits"), [("bfloat16", 8), ("float16", 10)])
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_error_of_compressed_sums(replicas, compression, digits) -> None:
    """At any size, also where float16 alone would overflow or be 0."""
    rng = np.random.default_rng(0)
    sizes = (1e-30, 1e-8, 1.0, 6e4, 1e30)
    grads = [(rng.normal(size=(replicas, 200)) * x).astype("float32") for x in sizes]
    grads.append(np.full((replicas, 2), 65504, "float32"))
    for grad, total in zip(grads, compressed_sum(grads, compression), strict=True):
        assert total.dtype == "float32"
        exact = grad.astype("float64")
        bound = np.abs(exact).sum(0) * replicas / 2**digits
        assert (np.abs(total - exact.sum(0)) <= bound).all()


def test_float16_keeps_small_elements_beside_large_ones() -> None:
    grad = np.float32([[1, 2.0**-28, 2.0**-41, 0]] * 2)
    (total,) = compressed_sum([grad], "float16")
    np.testing.assert_array_equal(total, [2, 2.0**-27, 0, 0])


@pytest.mark.parametrize("compression", ["bfloat16", "float16"])
def test_what_is_not_compressed(compression) -> None:
    integers = np.arange(6).reshape(2, 3) + 10**6
    nothing, zeros = np.zeros((2, 0), "float32"), np.zeros((2, 3), "float32")
    infinite = np.float32([[1, np.inf, np.nan]] * 2)
    sums = compressed_sum([integers, nothing, zeros, infinite], compression)
    np.testing.assert_array_equal(sums[0], integers.sum(0))
    assert sums[1].shape == (0,)
    np.testing.assert_array_equal(sums[2], zeros[0])
    np.testing.assert_array_equal(sums[3], [2, np.inf, np.nan])
