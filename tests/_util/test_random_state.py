"""Random numbers apart from those of the script."""

import random

import numpy as np

from replicax._util.random_state import RandomStream, fingerprint


def draw():
    return random.random(), np.random.rand()


def test_a_stream_leaves_what_is_drawn_outside_alone():
    random.seed(1)
    np.random.seed(1)
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    before = fingerprint()
    stream, other, alike = RandomStream("a"), RandomStream("b"), RandomStream("a")
    assert fingerprint() == before
    found = [draw()]
    with stream:
        first = draw()
        with stream:
            second = draw()
    found.append(draw())
    with stream:
        third = draw()
    assert found == expected
    with alike:
        assert [draw(), draw(), draw()] == [first, second, third]
    with other:
        assert draw() not in (first, expected[0])


def test_a_stream_is_left_after_an_error():
    before = fingerprint()
    stream = RandomStream("a")
    try:
        with stream:
            draw()
            raise KeyError
    except KeyError:
        assert fingerprint() == before
