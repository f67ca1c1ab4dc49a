"""The queue of closures: assignment to workers, retries, errors and results."""

import json
from collections import Counter

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from replicax.ps.closures import Closures, Outcome, Pending, Scheduled, Taken

CHIEF, A, B = "worker:0", "worker:1", "worker:2"
ERROR = {"type": "ValueError", "message": "bad", "traceback": "in step"}


def schedule(closures, *ids, function="step"):
    return [closures.schedule(id, {"of": id}, function, CHIEF) for id in ids]


def taken(closures, worker, functions=("step",)):
    closure = closures.take(worker, functions)
    return closure and closure.id


def is_over(closures):
    return closures.pending() == Pending()


def test_closures_are_taken_in_order_and_their_results_fetched():
    closures = Closures()
    schedule(closures, "x", "y")
    assert closures.take(A, ["step"]) == Taken("x", "step", {"of": "x"})
    assert taken(closures, B) == "y"
    assert taken(closures, B) is None
    assert closures.result("x", A, 7, None)
    assert not closures.result("y", A, 8, None)  # It is B's.
    assert closures.pending().running == {"y": B}
    assert closures.fetch(["x", "y", "z"], []) == {
        "x": Outcome("done", 7),
        "y": Outcome("running"),
        "z": Outcome("unknown"),
    }
    closures.result("y", B, None, None)
    assert is_over(closures)
    assert closures.fetch(["y"], ["x"]) == {"y": Outcome("done", None)}
    assert closures.fetch(["x"], []) == {"x": Outcome("unknown")}


def test_a_closure_waits_for_the_closures_that_it_needs():
    closures = Closures()
    schedule(closures, "x")
    closures.schedule("y", None, "step", CHIEF, needs=["x"])
    assert taken(closures, A) == "x"
    assert taken(closures, B) is None
    closures.release(A, died=True)
    assert taken(closures, B) == "x"
    closures.result("x", B, 1, None)
    assert taken(closures, A) == "y"


def test_only_workers_that_have_the_function_get_the_closure():
    closures = Closures()
    schedule(closures, "x", function="step")
    schedule(closures, "y", function="other")
    assert taken(closures, A, []) is None
    assert taken(closures, A, ["other"]) == "y"
    assert taken(closures, A, ["other"]) is None
    assert taken(closures, B, ["step", "other"]) == "x"


def test_closures_of_a_dead_worker_go_to_the_front_in_their_order():
    closures = Closures()
    schedule(closures, "a", "b", "c")
    taken(closures, A)
    taken(closures, A)
    closures.release(A, died=True)
    assert not closures.result("a", A, 1, None)
    assert [taken(closures, B) for _ in range(3)] == ["a", "b", "c"]


def test_a_closure_that_kills_its_workers_is_an_error_that_names_them():
    closures = Closures(max_retries=1)
    schedule(closures, "x", "next", function="step")
    for worker in (A, B):
        assert taken(closures, worker, ["step"]) == "x"
        closures.release(worker, died=True)
    error = closures.raise_if_failed()
    assert "'step' (x) was tried 2 times" in error["message"]
    assert "worker:1, worker:2" in error["message"]
    assert closures.fetch(["next"], [])["next"] == Outcome("cancelled")
    assert is_over(closures)


def test_a_worker_that_leaves_does_not_count_as_an_attempt():
    closures = Closures(max_retries=0)
    schedule(closures, "x")
    taken(closures, A)
    closures.release(A, died=False)
    assert taken(closures, B) == "x"


def test_an_error_cancels_queued_closures_and_is_reported_once():
    closures = Closures()
    schedule(closures, "bad", "running", "queued")
    taken(closures, A)
    taken(closures, B)
    closures.result("bad", A, None, ERROR)
    assert closures.error == ERROR
    assert schedule(closures, "refused") == [Scheduled(failed=ERROR)]
    assert schedule(closures, "later") == [Scheduled()]
    # This closure began before the error was reported: its own error is not reported.
    closures.result("running", B, None, ERROR)
    assert closures.raise_if_failed() is None
    assert closures.fetch(["bad", "running", "queued", "refused", "later"], []) == {
        "bad": Outcome("error", error=ERROR),
        "running": Outcome("error", error=ERROR),
        "queued": Outcome("cancelled"),
        "refused": Outcome("unknown"),
        "later": Outcome("queued"),
    }
    taken(closures, A)
    closures.result("later", A, None, ERROR)
    assert closures.raise_if_failed() == ERROR


def test_a_closure_that_ran_during_an_error_is_not_retried():
    closures = Closures()
    schedule(closures, "bad", "running")
    taken(closures, A)
    taken(closures, B)
    closures.result("bad", A, None, ERROR)
    closures.release(B, died=True)
    assert closures.fetch(["running"], []) == {"running": Outcome("cancelled")}
    assert is_over(closures)


def test_the_queue_is_bounded_and_forgetting_makes_room():
    closures = Closures(max_closures=3)
    assert schedule(closures, "a", "b", "c") == [Scheduled()] * 3
    taken(closures, A)
    closures.result("a", A, 1, None)
    assert schedule(closures, "d") == [Scheduled(is_full=True)]
    closures.fetch([], ["a", "b"])  # b is not finished.
    assert schedule(closures, "d") == [Scheduled()]
    assert closures.fetch(["b"], []) == {"b": Outcome("unknown")}
    assert taken(closures, A) == "c"


def test_the_bytes_of_payloads_are_bounded():
    closures = Closures()
    large = "x" * (16 * 2**20 - 2)
    answers = [closures.schedule(str(i), large, "step", CHIEF) for i in range(17)]
    assert [answer.is_full for answer in answers] == [False] * 16 + [True]
    for _ in range(16):
        closures.result(taken(closures, A), A, None, None)
    assert closures.schedule("y", large, "step", CHIEF) == Scheduled()


def test_closures_of_a_replaced_chief_are_dropped():
    closures = Closures()
    schedule(closures, "a", "b", "c")
    taken(closures, A)
    taken(closures, A)
    closures.result("a", A, None, ERROR)
    closures.disown(B)
    assert closures.error == ERROR
    closures.disown(CHIEF)
    assert closures.raise_if_failed() is None
    assert not closures.result("b", A, 1, None)
    assert is_over(closures)
    assert closures.fetch(["a", "c"], []) == {
        "a": Outcome("unknown"),
        "c": Outcome("unknown"),
    }


def test_dropping_one_owner_keeps_what_others_scheduled():
    closures = Closures()
    schedule(closures, "a")
    closures.schedule("theirs", 1, "step", B)
    closures.disown(CHIEF)
    assert taken(closures, A) == "theirs"
    assert taken(closures, A) is None


class AnyOrder(RuleBasedStateMachine):
    """Each closure is done once, fails, or is cancelled; no closure is lost."""

    workers = st.sampled_from([A, B])

    def __init__(self):
        super().__init__()
        self.closures = Closures(max_retries=1, max_closures=8)
        self.number = 0
        self.done: Counter[str] = Counter()
        self.scheduled: set[str] = set()
        self.forgotten: set[str] = set()
        self.running: dict[str, str] = {}
        self.deaths: Counter[str] = Counter()

    @rule()
    def schedule(self):
        self.number += 1
        id = str(self.number)
        answer = self.closures.schedule(id, {"of": id}, "step", CHIEF)
        if answer == Scheduled():
            self.scheduled.add(id)
        elif answer.is_full:
            assert len(self.scheduled - self.forgotten) >= 8
        else:
            assert answer.failed is not None

    @rule(worker=workers)
    def take(self, worker):
        closure = self.closures.take(worker, ["step"])
        if closure is None:
            assert self.closures.pending().queued == 0
            return
        assert closure.payload == {"of": closure.id}
        assert closure.id not in self.running
        assert closure.id not in self.done
        self.running[closure.id] = worker

    @rule(worker=workers, fails=st.booleans(), data=st.data())
    def result(self, worker, fails, data):
        if not self.running:
            return
        id = data.draw(st.sampled_from(sorted(self.running)))
        is_own = self.closures.result(id, worker, 1, ERROR if fails else None)
        assert is_own == (self.running[id] == worker)
        if is_own:
            del self.running[id]
            self.done[id] += 1

    @rule(worker=workers)
    def die(self, worker):
        mine = [id for id, holder in self.running.items() if holder == worker]
        self.closures.release(worker, died=True)
        for id in mine:
            del self.running[id]
            self.deaths[id] += 1
            assert self.deaths[id] <= 2

    @rule()
    def tell(self):
        self.closures.raise_if_failed()

    @rule()
    def forget(self):
        known = self.closures.fetch(sorted(self.scheduled - self.forgotten), [])
        finished = [id for id, outcome in known.items() if outcome.is_final]
        self.closures.fetch([], finished)
        self.forgotten |= set(finished)

    @rule()
    def reload(self):
        saved = json.loads(json.dumps(msgspec.to_builtins(self.closures)))
        self.closures = msgspec.convert(saved, Closures)

    @invariant()
    def none_is_lost(self):
        status = {
            id: self.closures.fetch([id], [])[id].status
            for id in self.scheduled - self.forgotten
        }
        assert "unknown" not in status.values()
        running = self.closures.pending().running
        assert running == self.running
        assert {i for i, s in status.items() if s == "running"} == set(running)
        assert all(status[id] in ("done", "error") for id in self.done if id in status)
        assert set(self.done.values()) <= {1}
        queued = [i for i, s in status.items() if s == "queued"]
        assert self.closures.pending().queued == len(queued)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)
