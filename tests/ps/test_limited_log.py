"""A flood of warnings is cut off, and counted."""

from replicax.ps.limits import LimitedLog


def test_warnings_over_the_limit_are_counted_in_the_next_minute(caplog):
    seconds = 0.0
    log = LimitedLog(per_minute=8, now=lambda: seconds)
    for number in range(100):
        log.warn(f"refused {number}")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"refused {number}" for number in range(8)]
    assert log.num_omitted == 92
    caplog.clear()
    seconds = 61.0
    log.warn("again")
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["92 warnings were left out.", "again"]
