"""Exchanging values: threads as workers, and a store in memory."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from replicax._util import waiting
from replicax.cluster import workers as workers_module
from replicax.cluster.dispatch_log import Operation
from replicax.cluster.store import Store, StoreError
from replicax.cluster.timeouts import Timeouts
from replicax.cluster.workers import Workers
from replicax.errors import ClusterError, ClusterMismatchError


class Service:
    """What the coordination service's client does, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_down = False
        self._lock = threading.Lock()

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        assert allow_overwrite
        with self._working():
            self.values[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        with self._working():
            found = self.values.items()
            return [(key, value) for key, value in found if key.startswith(prefix)]

    def key_value_delete(self, key: str) -> None:
        with self._working():
            for other in list(self.values):
                if other == key or other.startswith(f"{key}/"):
                    del self.values[other]

    def _working(self) -> threading.Lock:
        if self.is_down:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: no route\nand a stack")
        return self._lock


def cluster_of(num: int, service: Service, **timeouts: float) -> list[Workers]:
    names = [f"worker:{i}" for i in range(num)]
    addresses = [f"host{i}:1" for i in range(num)]
    return [
        Workers(
            names, addresses, i, store=Store(service), timeouts=Timeouts(**timeouts)
        )
        for i in range(num)
    ]


def on_all(cluster: list[Workers], act: Callable[[Workers], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(cluster)) as pool:
        return list(pool.map(act, cluster))


def test_alone() -> None:
    alone = Workers()
    assert (alone.count, alone.name, alone.is_chief) == (1, "worker:0", True)
    assert alone.exchange("anything", {"a": 1}) == [{"a": 1}]
    assert alone.watch is None
    assert workers_module.current().count == 1


def test_exchange_gathers_all_values() -> None:
    service = Service()
    cluster = cluster_of(3, service)

    def exchange(worker: Workers) -> list[Any]:
        return [
            *(worker.exchange("a", [worker.index, i]) for i in range(50)),
            worker.exchange("b", None),
            worker.exchange("a", worker.name),
        ]

    told = on_all(cluster, exchange)
    assert told[0] == told[1] == told[2]
    assert told[0] == [
        *([[k, i] for k in range(3)] for i in range(50)),
        [None] * 3,
        ["worker:0", "worker:1", "worker:2"],
    ]
    # Nothing piles up: of each name the last exchange stays.
    assert sorted(service.values) == [
        f"replicax/exchange/{name}/{i}" for name in ("a/50", "b/0") for i in range(3)
    ]


@pytest.mark.parametrize("deadline", ["startup", "checkpoint"])
def test_a_missing_worker(deadline: str) -> None:
    first = cluster_of(3, service := Service(), **{deadline: 0.3})[0]
    service.values["replicax/exchange/start/0/1"] = "1"
    begin = time.monotonic()
    with pytest.raises(
        ClusterError,
        match=r"^worker:0: worker:2 \(host2:1\) did not come to start within 0 s"
        rf".*\(rx\.Timeouts\({deadline}=\.\.\.\)\)\.$",
    ) as caught:
        first.exchange("start", 0, deadline)
    assert 0.3 <= time.monotonic() - begin < 10
    assert caught.value.culprit == "worker:2"


def test_a_worker_whose_script_has_ended() -> None:
    first, _ = cluster_of(2, Service())
    assert first.watch is not None
    first.watch.signs[1].has_left = True
    begin = time.monotonic()
    with pytest.raises(
        ClusterMismatchError, match=r"worker:1 \(host1:1\) ended its script"
    ):
        first.exchange("start", 0)
    assert time.monotonic() - begin < 10


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Workers]]:
    """Two workers that send heartbeats, and would end no process."""
    cluster = cluster_of(2, Service(), startup=20)
    watches = [worker.watch for worker in cluster if worker.watch is not None]
    for watch in watches:
        monkeypatch.setattr(watch, "fail", print)
        watch.start()
    yield cluster
    for watch in watches:
        watch.close()


def step(worker: Workers) -> None:
    """Dispatch a step."""
    assert worker.watch is not None
    worker.watch.dispatching(Operation("run(step)", b"program 1;", 1))
    worker.watch.dispatched(None)


def as_script(worker: Workers, act: Callable[[], Any]) -> str:
    """The error of a worker's script, which this thread runs."""
    assert worker.log is not None
    worker.log._main_thread = threading.get_ident()
    try:
        act()
    except ClusterMismatchError as error:
        return str(error)
    return "no error"


def test_a_worker_that_skips_an_exchange(watched: list[Workers]) -> None:
    def script(worker: Workers) -> None:
        for _ in range(5 + worker.index):
            step(worker)
        if worker.index == 0:
            worker.exchange("checkpoint", 0)

    begin = time.monotonic()
    first, _ = on_all(watched, lambda x: as_script(x, lambda: script(x)))
    assert time.monotonic() - begin < 12
    assert first.startswith(
        "worker:0 waits in checkpoint after step 5, but worker:1 (host1:1) went on to "
        "step 6 without it, and is at run(step). All workers"
    )
    assert "strategy.is_chief" in first


def test_two_workers_wait_in_different_exchanges(watched: list[Workers]) -> None:
    def script(worker: Workers) -> None:
        worker.exchange("a", 0)
        worker.exchange("save" if worker.index else "program", 0)

    begin = time.monotonic()
    told = on_all(watched, lambda x: as_script(x, lambda: script(x)))
    assert time.monotonic() - begin < 10
    for text, me, other in zip(
        told, ("program", "save"), ("save", "program"), strict=True
    ):
        assert f" waits in {me}, but worker:" in text
        assert f" is at the exchange of '{other}'. All" in text


def test_while_waiting_may_raise() -> None:
    first, _ = cluster_of(2, Service())
    missing_at_first = []

    def look(missing: Any) -> None:
        missing_at_first.append(list(missing))
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        first.exchange("start", 0, while_waiting=look)
    assert missing_at_first == [[1]]


def test_a_long_wait_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "EVERY_SECONDS", 0.2)
    first, _ = cluster_of(2, Service(), startup=0.35)
    with caplog.at_level(logging.WARNING, "replicax"), pytest.raises(ClusterError):
        first.exchange("start", 0)
    assert caplog.records[0].getMessage() == (
        "waiting for worker:1 (host1:1) (start) for 0 s; at most 0 s more"
    )
    assert 2 <= len(caplog.records) <= 3


def test_the_service_is_gone() -> None:
    first, _ = cluster_of(2, service := Service())
    service.is_down = True
    with pytest.raises(
        ClusterError,
        match=r"coordination service beside worker:0 \(host0:1\) does not answer "
        r"\(UNAVAILABLE: no route\); start needed it",
    ) as caught:
        first.exchange("start", 0)
    assert isinstance(caught.value.__cause__, StoreError)


def test_the_store() -> None:
    store = Store(service := Service())
    store.put("a/b", "1")
    store.put("a/b", "2")
    store.put("a/c/d", "3")
    store.put("ab", "4")
    assert store.read("a") == {"b": "2", "c/d": "3"}
    store.delete("a/c")
    assert store.read("a") == {"b": "2"}
    assert json.dumps(store.read("nothing")) == "{}"
    service.is_down = True
    for call in (store.read, store.delete):
        with pytest.raises(StoreError, match=r"^UNAVAILABLE: no route$"):
            call("a")
