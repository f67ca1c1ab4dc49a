"""What a worker tells a restarted board again."""

from replicax.ps.session import ReplayLog


def test_only_the_last_call_of_each_name_is_repeated_in_order() -> None:
    told = ReplayLog()
    told.note("put", {"key": "epoch", "value": 1})
    told.note("arrive", {"barrier": "end of epoch 1", "worker": "worker:0"})
    told.note("claim", {"stream": "fit 1/epoch/1", "call": 3})
    told.note("put", {"key": "epoch", "value": 2})
    assert told.again() == [
        ("arrive", {"barrier": "end of epoch 1", "worker": "worker:0"}),
        ("put", {"key": "epoch", "value": 2}),
    ]


def test_of_streams_only_the_newest_is_opened_and_ended_again() -> None:
    told = ReplayLog()
    told.note("open", {"stream": "fit 1/epoch/1", "limit": 9})
    told.note("end", {"stream": "fit 1/epoch/1", "length": 5})
    assert [method for method, _ in told.again()] == ["open", "end"]
    told.note("open", {"stream": "fit 1/epoch/2", "limit": 9})
    assert told.again() == [("open", {"stream": "fit 1/epoch/2", "limit": 9})]


def test_what_is_old_is_forgotten() -> None:
    told = ReplayLog()
    for number in range(1000):
        told.note("arrive", {"barrier": f"end of epoch {number}"})
    again = told.again()
    assert len(again) < 100
    assert again[-1] == ("arrive", {"barrier": "end of epoch 999"})
