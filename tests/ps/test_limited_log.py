"""Warnings by kind and address: a flood of one hides no other."""

from replicax.ps.unauthenticated import LimitedLog


def test_kinds_and_addresses_have_limits_of_their_own(caplog):
    seconds = 0.0
    log = LimitedLog(per_minute=8, now=lambda: seconds)
    for number in range(100):
        log.warn("idle connections", "192.0.2.1", f"idle {number}")
        log.warn("wrong tokens", f"198.51.100.{number}", f"wrong {number}")
    log.warn("idle connections", "192.0.2.2", "idle from elsewhere")
    log.warn("refused messages", "192.0.2.1", "refused")
    texts = [record.getMessage() for record in caplog.records]
    assert sum(text.startswith("idle ") for text in texts) == 3
    assert sum(text.startswith("wrong ") for text in texts) == 8
    assert {"idle from elsewhere", "refused"} <= set(texts)
    assert log.unwritten == 98 + 92
    caplog.clear()
    seconds = 59.0
    log.tick()
    assert not caplog.records
    seconds = 61.0
    log.tick()
    (summary,) = [record.getMessage() for record in caplog.records]
    assert summary.startswith(
        "Warnings that were left out: 98 idle connections of 192.0.2.1, 1 wrong tokens "
        "of 198.51.100."
    )
    assert summary.endswith("85 others.")
    log.warn("idle connections", "192.0.2.1", "again")
    assert "again" in caplog.text
