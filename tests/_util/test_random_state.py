"""Streams of random numbers, separate from the script's own."""

import contextlib
import random

import numpy as np

from replicax._util.random_state import RandomStream, fingerprint


def draw():
    return random.random(), np.random.rand()


def test_a_stream_does_not_change_numbers_outside():
    random.seed(1)
    np.random.seed(1)
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    before = fingerprint()
    stream, other, equal = RandomStream("a"), RandomStream("b"), RandomStream("a")
    assert fingerprint() == before
    outside = [draw()]
    with stream:
        first = draw()
        with stream:
            second = draw()
    outside.append(draw())
    with contextlib.suppress(KeyError), stream:
        third = draw()
        raise KeyError
    assert outside == expected
    with equal:
        assert [draw(), draw(), draw()] == [first, second, third]
    with other:
        assert draw() not in (first, expected[0])
