"""One server's store: pushes exactly once, versions, synchronous steps, its state."""

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps import asking

from replicax.ps.group_vectors import SlotKey
from replicax.ps.limits import RequestError, Superseded
from replicax.ps.messages import Create, Pull
from replicax.ps.optimizers import optimizer_rule
from replicax.ps.partition import FixedShardsPartitioner, VariableInfo, place
from replicax.ps.store import UnknownGroup, VariableStore
from replicax.ps.wire import WireError

INFO = VariableInfo(path="dense/kernel", shape=(4, 2), dtype="float32")
ADD = {"kind": "add"}


def sgd(**arguments) -> dict:
    return optimizer_rule(keras.optimizers.SGD(**arguments), [])


def held(rule, num_servers=1, infos=(INFO,)):
    """A group and the stores that hold it, at zero."""
    partitioner = FixedShardsPartitioner(num_servers)
    group = place("weights", rule, infos, num_servers, partitioner)
    stores = [VariableStore(server) for server in range(num_servers)]
    for server, store in enumerate(stores):
        lengths = group.lengths_on(server).items()
        store.create(group, {d: np.zeros(n, d) for d, n in lengths})
    return group, stores


def push(store, sequence, value=1.0, *, worker="worker:0", session="a", **more):
    length = store.group("weights").lengths["float32"]
    vectors = {"float32": np.full(length, value, np.float32)}
    more = {"based_on": 0, "vectors": vectors} | more
    return asking.push(
        store, "weights", worker=worker, session=session, sequence=sequence, **more
    )


def values(store) -> list[float]:
    return asking.pull(store, "weights").vectors["float32"].tolist()


def test_push_applies_the_optimizer_and_returns_the_newest_values() -> None:
    _, [store] = held(sgd(learning_rate=0.5))
    pushed = push(store, 1)
    assert (pushed.version, pushed.staleness, pushed.applied) == (1, 0, True)
    assert pushed.vectors["float32"].tolist() == [-0.5] * 8
    assert not pushed.vectors["float32"].flags.writeable
    assert asking.pull(store, "weights", have=1).vectors == {}
    assert asking.pull(store, "weights", have=0).version == 1
    assert values(store) == [-0.5] * 8


def test_an_older_push_and_an_older_session_are_refused(caplog) -> None:
    _, [store] = held(ADD)
    push(store, 5)
    with pytest.raises(
        RequestError, match=r"push of worker:0: number 4 came after number 5"
    ):
        push(store, 4)
    assert "push of worker:0: number 4" in caplog.text
    push(store, 1, session="b")
    with pytest.raises(Superseded, match=r"worker:0: session 'a' was replaced by.*'b'"):
        push(store, 6, session="a")
    assert values(store) == [2.0] * 8


def test_pushes_of_a_retried_closure_are_applied_once() -> None:
    _, [store] = held(ADD)
    for number in (1, 2):  # Then its worker dies.
        assert push(store, number, closure=("chief 1", number)).applied
    before = store.num_changes
    other = {"worker": "worker:1", "session": "b"}
    for number, value in ((1, 5.0), (2, 7.0), (3, 1.0)):
        pushed = push(store, number, value, closure=("chief 1", number), **other)
        assert pushed.applied == (number == 3)
    push(store, 4, closure=("chief 2", 1), **other)
    assert store.num_changes == before + 4  # Snapshots know of repeated ones, too.
    again = VariableStore(0)
    again.load_state(store.state())
    for each in (store, again):
        # The first worker was only suspended, and repeats its push.
        late = push(each, 3, closure=("chief 1", 3))
        assert (late.applied, late.version) == (False, 4)
        assert values(each) == [4.0] * 8
        status = each.status()
        assert (status["applied"], status["lost"]) == (4, 0)


def test_staleness_counts_the_updates_in_between() -> None:
    _, [store] = held(sgd(learning_rate=1.0))
    push(store, 1, based_on=0)
    push(store, 1, worker="worker:1", based_on=0)
    push(store, 2, worker="worker:1", based_on=0)
    push(store, 2, worker="worker:1", based_on=0)
    assert push(store, 2, based_on=3).staleness == 0
    staleness = {"worker:0": {"0": 2}, "worker:1": {"1": 1, "2": 1}}
    assert store.status()["staleness"] == staleness
    assert store.status()["num_updates"] == 4


def test_create_again_keeps_values_and_another_group_is_refused() -> None:
    group, [store] = held(ADD)
    push(store, 1)
    store.create(group, {"float32": np.full(8, 9, np.float32)})
    assert values(store) == [1.0] * 8
    other = place("weights", sgd(), [INFO], 1)
    with pytest.raises(RequestError, match=r"'weights'.*its config: "):
        store.create(other, {"float32": np.zeros(8, np.float32)})
    longer = place("weights", ADD, [INFO, INFO], 1)
    with pytest.raises(RequestError, match=r"its shards: 1 and 2"):
        store.create(longer, {"float32": np.zeros(16, np.float32)})


def test_unknown_groups_and_invalid_rules_are_refused() -> None:
    group, [store] = held(ADD)
    with pytest.raises(UnknownGroup, match=r"'other' is not on server 0.*'weights'"):
        asking.pull(store, "other")
    with pytest.raises(WireError, match="'float32' has dtype 'float16'"):
        asking.ask(VariableStore(0), Create(group), {"float32": np.zeros(8, "f2")})
    config = {"module": "keras.optimizers", "class_name": "None", "config": {}}
    bad = place("bad", {"kind": "optimizer", "config": config}, [INFO], 1)
    with pytest.raises(RequestError, match=r"'bad': its optimizer cannot be built"):
        store.create(bad, {"float32": np.zeros(8, "f4")})
    assert list(store.status()["groups"]) == ["weights"]
    good = place("bad", ADD, [INFO], 1)
    store.create(good, {"float32": np.zeros(8, "f4")})
    assert sorted(store.status()["groups"]) == ["bad", "weights"]
    assert values(store) == [0.0] * 8


def test_a_server_without_shards_counts_versions() -> None:
    group = place("weights", sgd(), [INFO], 2)
    store = VariableStore(1)
    store.create(group, {})
    pushed = asking.push(
        store,
        "weights",
        worker="worker:0",
        session="a",
        sequence=1,
        based_on=0,
        vectors={},
    )
    assert (pushed.version, pushed.vectors) == (1, {})
    again = VariableStore(1)
    again.load_state(store.state())
    assert asking.pull(again, "weights").version == 1


def in_threads(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result(timeout=60) for f in [pool.submit(call) for call in calls]]


def test_slots_are_read_and_set() -> None:
    _, [store] = held(sgd(learning_rate=1.0, momentum=0.5))
    push(store, 1)
    slots = store.group("weights").slots()
    assert slots["iteration", None] == 1
    assert slots["momentum", 0].tolist() == [[-1.0, -1.0]] * 4
    rate, momentum = SlotKey("learning_rate", None), SlotKey("momentum", 0)
    asking.set_slots(store, "weights", {rate: np.float32(0)})
    push(store, 2)
    assert slots["momentum", 0].tolist() == [[-1.0, -1.0]] * 4
    assert values(store) == [-1.5] * 8
    zeros = np.zeros((4, 2), np.float32)
    asking.set_slots(store, "weights", {rate: np.float32(1), momentum: zeros})
    push(store, 3)
    assert values(store) == [-2.5] * 8
    with pytest.raises(RequestError, match="no variable 'speed'"):
        asking.set_slots(store, "weights", {SlotKey("speed", None): np.float32(1)})
    with pytest.raises(RequestError, match=r"got shape \(3,\)"):
        asking.set_slots(store, "weights", {momentum: np.zeros(3, "f4")})


def test_groups_do_not_wait_for_each_other() -> None:
    _, [store] = held(ADD)
    waiting = place("slow", ADD, [INFO], 1)
    store.create(waiting, {"float32": np.zeros(8, np.float32)})
    with store._groups["slow"].lock:
        in_threads(lambda: push(store, 1))
    assert values(store) == [1.0] * 8


def test_concurrent_pushes_and_states_lose_nothing() -> None:
    _, [store] = held(sgd(learning_rate=1.0, momentum=0.0))
    seen: list[tuple[int, float]] = []

    def work(worker: int) -> None:
        for i in range(1, 41):
            pushed = push(store, i, worker=f"worker:{worker}", based_on=i)
            vector = pushed.vectors["float32"]
            assert (vector == vector[0]).all()
            seen.append((pushed.version, float(vector[0])))

    def watch() -> None:
        for _ in range(10):
            state = store.state()
            version = state["meta"]["groups"][0]["version"]
            assert state["arrays"]["0/values/float32"].tolist() == [-version] * 8
            assert state["arrays"]["0/slots/0"] == version

    in_threads(*(lambda w=w: work(w) for w in range(4)), watch)
    assert all(value == -version for version, value in seen)
    assert asking.pull(store, "weights").version == 160


def test_a_restored_store_continues_like_the_original() -> None:
    _, [store] = held(sgd(learning_rate=0.1, momentum=0.9))
    for i in range(1, 4):
        push(store, i, based_on=i - 1)
    state = store.state()
    other = VariableStore(0)
    other.load_state(state)
    before = state["arrays"]["0/values/float32"].copy()
    for each in (store, other):
        assert push(each, 3).applied, "it was applied before the state was taken"
        push(each, 4, 2.0, based_on=3)
    assert values(store) == values(other)
    assert asking.pull(other, "weights").version == 4
    assert other.status()["staleness"] == store.status()["staleness"]
    np.testing.assert_array_equal(state["arrays"]["0/values/float32"], before)
    assert other.incarnation != store.incarnation
    push(other, 1, session="b")
    with pytest.raises(Superseded):
        push(other, 5, session="a")
    state["arrays"]["0/slots/2"] = np.zeros(3, np.float32)
    with pytest.raises(RequestError, match="this version of Keras has"):
        VariableStore(0).load_state(state)


def test_lost_updates_are_counted_by_versions() -> None:
    _, [store] = held(ADD)
    push(store, 1)
    restored = VariableStore(0)
    restored.load_state(store.state())
    for number in (2, 3, 4):
        seen = push(store, number)

    def counts(store):
        status = store.status()["groups"]["weights"]
        return status["applied"], status["lost"]

    asking.ask(restored, Pull("weights", (seen.incarnation, seen.version)))
    assert counts(restored) == (1, 3)
    push(restored, 5, seen=(seen.incarnation, seen.version - 1))
    assert counts(restored) == (2, 3), "another worker has seen less"
    again = VariableStore(0)
    again.load_state(restored.state())
    newest = push(restored, 6)
    push(again, 6, seen=(newest.incarnation, newest.version))
    assert counts(again) == (3, 4)
    assert counts(store) == (4, 0)


class Model:
    """What a store should hold: exact, for gradients are small whole numbers."""

    def __init__(self) -> None:
        self.value = 0.0
        self.version = 0
        self.done: dict[str, tuple[int, float]] = {}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "retry", "replay", "pull", "reload"]),
        st.integers(0, 2),
        st.integers(0, 1),
        st.integers(-3, 3),
    ),
    max_size=25,
)


@pytest.mark.parametrize("lr", [None, 0.5])
def test_any_interleaving_applies_each_push_once(lr) -> None:
    rule = ADD if lr is None else sgd(learning_rate=lr)
    factor = 1.0 if lr is None else -lr

    @settings(max_examples=40 if lr is None else 6, database=None)
    @given(EVENTS, st.integers(1, 2))
    def check(events, num_servers) -> None:
        _, stores = held(rule, num_servers)
        models = [Model() for _ in stores]
        handed: list[tuple[np.ndarray, np.ndarray]] = []
        for kind, w, server, amount in events:
            server %= num_servers
            store, model = stores[server], models[server]
            worker = f"worker:{w}"
            sequence, last = model.done.get(worker, (0, 0.0))
            if kind == "push":
                model.done[worker] = sequence + 1, amount
                model.value += factor * amount
                model.version += 1
                result = push(store, sequence + 1, amount, worker=worker)
                assert result.applied
            elif kind == "retry" and sequence:
                result = push(store, sequence, last, worker=worker)
                assert result.applied
            elif kind == "replay" and sequence > 1:
                with pytest.raises(RequestError, match="came after number"):
                    push(store, sequence - 1, 1.0, worker=worker)
                continue
            elif kind == "reload":
                stores[server] = VariableStore(server)
                stores[server].load_state(store.state())
                result = asking.pull(stores[server], "weights")
            else:
                result = asking.pull(store, "weights")
            assert result.version == model.version
            vector = result.vectors["float32"]
            np.testing.assert_array_equal(vector, np.float32(model.value))
            handed.append((vector, vector.copy()))
        for vector, copy in handed:
            np.testing.assert_array_equal(vector, copy)

    check()
