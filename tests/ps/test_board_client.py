"""The calls that a worker replays on a restarted board."""

from replicax.ps.session import ReplayLog


def test_only_the_last_call_of_each_name_is_replayed_in_order() -> None:
    log = ReplayLog()
    log.record("put", {"key": "epoch", "value": 1})
    log.record("arrive", {"barrier": "end of epoch 1", "worker": "worker:0"})
    log.record("claim", {"stream": "fit 1/epoch/1", "call": 3})
    log.record("put", {"key": "epoch", "value": 2})
    assert log.calls() == [
        ("arrive", {"barrier": "end of epoch 1", "worker": "worker:0"}),
        ("put", {"key": "epoch", "value": 2}),
    ]


def test_only_calls_of_the_newest_stream_are_replayed() -> None:
    log = ReplayLog()
    log.record("open", {"stream": "fit 1/epoch/1", "limit": 9})
    log.record("end", {"stream": "fit 1/epoch/1", "length": 5})
    assert [method for method, _ in log.calls()] == ["open", "end"]
    log.record("open", {"stream": "fit 1/epoch/2", "limit": 9})
    assert log.calls() == [("open", {"stream": "fit 1/epoch/2", "limit": 9})]


def test_old_calls_are_dropped() -> None:
    log = ReplayLog()
    for number in range(1000):
        log.record("arrive", {"barrier": f"end of epoch {number}"})
    again = log.calls()
    assert len(again) < 100
    assert again[-1] == ("arrive", {"barrier": "end of epoch 999"})
