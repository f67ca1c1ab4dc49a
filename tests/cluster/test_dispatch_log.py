"""The log of what a worker does, and where the logs of several part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.cluster import dispatch_log
from replicax.cluster.dispatch_log import (
    Difference,
    DispatchLog,
    LogTail,
    Operation,
    OrderCheck,
)

KINDS = [Operation(f"run({name})", f"{name};".encode(), 1) for name in "abc"]
KINDS.append(Operation("reduce", b"reduce;"))
ORDERS = st.lists(st.integers(0, len(KINDS) - 1), max_size=30)


def log_of(order) -> DispatchLog:
    log = DispatchLog()
    for kind in order:
        log.note(KINDS[kind])
    return log


def told(log: DispatchLog, count: int = 0, *, ended: bool = False) -> LogTail:
    return LogTail.decode(log.since(count, has_ended=ended).encode())


class Store:
    """What all workers share, in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, key: str, value: str) -> None:
        self.texts[key] = value

    def read(self, folder: str) -> dict[str, str]:
        return {
            key.removeprefix(f"{folder}/"): text
            for key, text in self.texts.items()
            if key.startswith(f"{folder}/")
        }


@given(ORDERS, st.integers(0, 30))
def test_a_checksum_equals_that_of_a_shorter_log(order, count) -> None:
    log = log_of(order)
    log.latest()
    count = min(count, len(order))
    assert log.checksum_at(count) == log_of(order[:count]).latest()[1]
    assert log.latest()[2] == sum(KINDS[kind].num_steps for kind in order)


@given(ORDERS, ORDERS, ORDERS)
def test_the_first_difference_is_found(common, rest, other) -> None:
    logs = [log_of([*common, *rest]), log_of([*common, *other])]
    both = [[*common, *rest], [*common, *other]]
    length = max(map(len, both))
    padded = [[*order, *[None] * (length - len(order))] for order in both]
    places = [i for i in range(length) if padded[0][i] != padded[1][i]]
    found = Difference.between([told(log, ended=True) for log in logs])
    if not places:
        assert found is None
        return
    assert found is not None
    expected = [None if o[places[0]] is None else KINDS[o[places[0]]] for o in padded]
    assert list(found.operations) == expected
    before = [KINDS[i] for i in both[0][: places[0]]]
    assert found.step == sum(operation.num_steps for operation in before)


def test_a_shorter_log_is_no_difference() -> None:
    logs = [log_of([0, 1, 2]), log_of([0, 1, 0]), log_of([0])]
    found = Difference.between([told(log) for log in logs])
    assert found is not None
    assert found.step == 2
    assert found.culprit == 1
    assert Difference.between([told(logs[0]), told(logs[2])]) is None
    assert Difference.between([told(logs[0]), None]) is None


@pytest.mark.parametrize("ahead", [0, 1], ids=["the other is", "this one is"])
def test_logs_are_compared_if_either_worker_is_ahead(ahead: int) -> None:
    logs = [log_of([]), log_of([])]
    checks = [OrderCheck(log, 2, i, Store()) for i, log in enumerate(logs)]
    for i in range(200):
        for number, each in enumerate(logs):
            num = 3 if number == ahead else 1
            for k in range(num if i < 100 else 4 - num):
                # As the hundredth operation of the second one comes another.
                differs = number == 1 and each.latest()[0] == 99 and k == 0
                each.note(KINDS[2 if differs else 0])
        for mine, its in ((0, 1), (1, 0)):
            heard = logs[its].latest()[:2], checks[its].differs_after
            checks[mine].compare(its, *heard)
        if min(log.latest()[0] for log in logs) < 100:
            assert checks[0].differs_after is None
    for check in checks:
        assert check.is_settling
        assert check.differs_after is not None
        assert 90 < check.differs_after < 100


def test_a_very_long_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_log, "_SIZE", 100)
    log = DispatchLog()
    for i in range(1000):
        log.note(KINDS[i % 2])
        if i % 10 == 0:
            log.latest()
    log.latest()
    assert log.latest() == log_of([i % 2 for i in range(1000)]).latest()
    assert log.checksum_at(10) is None
    assert log.checksum_at(950) == log_of([i % 2 for i in range(950)]).latest()[1]
    last = told(log, 3)
    assert last.end == 1000
    assert 100 <= len(last.operations) < 300
    assert last.steps == last.after


def test_three_workers_find_the_odd_one_out() -> None:
    store = Store()
    orders = [[0, 1, 0, 1, 3], [0, 1, 0, 0], [0, 1, 0, 1]]
    logs = [log_of(order) for order in orders]
    checks = [OrderCheck(log, 3, i, store) for i, log in enumerate(logs)]
    for _ in range(3):
        for i, check in enumerate(checks):
            for k, peer in enumerate(checks):
                if i != k:
                    check.compare(k, logs[k].latest()[:2], peer.differs_after)
            check.exchange_logs(has_left=False)
    for check in checks:
        assert check.difference is not None
        assert check.difference.culprit == 1
        assert check.difference.step == 3
