"""When to give up, and how long to wait before a restart."""

import pytest

from replicax.launch.restart_policy import back_off, crash_loop


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], False),
        ([-1, -1, -1], False),
        ([-1, -1, -1, -1], True),
        ([5, 5, 5, 5], True),
        ([5, 9, 9, 9], False),
        ([5, 9, 9, 9, 9], True),
        ([5, 5, 5, 6], False),
        ([5, 4, 3, 2], True),
    ],
)
def test_crash_loop(steps: list[int], expected: bool) -> None:
    assert crash_loop(steps) is expected


def test_back_off_doubles_up_to_a_minute() -> None:
    for restart, seconds in enumerate([1, 2, 4, 8, 16, 32, 60, 60]):
        waits = {back_off(restart, 1.0) for _ in range(50)}
        assert min(0.75 * seconds, 60) <= min(waits)
        assert max(waits) <= min(1.25 * seconds, 60)
    assert len({back_off(0, 1.0) for _ in range(50)}) > 1
    assert back_off(10_000, 1.0) == 60
    assert back_off(3, 0.0) == 0
