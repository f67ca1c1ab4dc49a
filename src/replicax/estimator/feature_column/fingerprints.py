"""Fingerprints of values: 64 bits, the same in every process and on every machine."""

import functools
import hashlib

import numpy as np

__all__ = ["crossed", "fingerprints"]

_KEPT_TEXTS = 2**16
_STEP = np.uint64(0x9E3779B97F4A7C15)


@functools.lru_cache(maxsize=_KEPT_TEXTS)
def _fingerprint(text: str) -> int:
    # Bytes that are no UTF-8 were kept as surrogates when they were read.
    encoded = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def fingerprints(values: np.ndarray) -> np.ndarray:
    """One for each value; each distinct value is hashed once.

    Args:
        values: Integers, or an object array of `str`, of any shape. An integer has the
            fingerprint of its decimal digits.

    Returns:
        `uint64` of the same shape.

    Example:
        >>> import numpy as np
        >>> one, other = fingerprints(np.array([7])), fingerprints(np.array(["7"], "O"))
        >>> bool(one[0] == other[0])
        True
    """
    if values.dtype != object:
        distinct, place = np.unique(values, return_inverse=True)
        of_distinct = [_fingerprint(str(value)) for value in distinct.tolist()]
        return np.array(of_distinct, np.uint64)[place].reshape(values.shape)
    # A dictionary is twice as fast as sorting strings.
    texts = values.ravel().tolist()
    known = {text: _fingerprint(text) for text in dict.fromkeys(texts)}
    found = np.fromiter(map(known.__getitem__, texts), np.uint64, len(texts))
    return found.reshape(values.shape)


def crossed(prints: list[np.ndarray], key: int) -> np.ndarray:
    """Fingerprints of all combinations of each row's values.

    Args:
        prints: Fingerprints `uint64[B, k]` of each part, the `k` may differ.
        key: Where the combination starts; others give other fingerprints.

    Returns:
        `uint64[B, k1 * k2 * ...]`, the last part's values varying fastest.
    """
    rows = len(prints[0])
    combined = np.full((rows, 1), key, np.uint64)
    for part in prints:
        pairs = combined[:, :, None] * _STEP + part[:, None, :]
        combined = _mixed(pairs).reshape(rows, pairs.shape[1] * pairs.shape[2])
    return combined


def _mixed(x: np.ndarray) -> np.ndarray:
    # The finalizer of SplitMix64: every bit depends on every bit.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
