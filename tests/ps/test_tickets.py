"""Leases on steps: order, bounded staleness, lost steps, and the end of a stream."""

import json

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from replicax.ps.tickets import StepTickets

A, B, C = "worker:0", "worker:1", "worker:2"
WORKERS = st.sampled_from([A, B, C])


def reloaded(tickets):
    saved = json.loads(json.dumps(msgspec.to_builtins(tickets, str_keys=True)))
    return msgspec.convert(saved, StepTickets, str_keys=True)


class AnyOrderOfSteps(RuleBasedStateMachine):
    """Compares the tickets with a simple model of the same events."""

    def make(self) -> StepTickets:
        return StepTickets(length=self.limit, max_staleness=self.bound)

    @initialize(
        limit=st.none() | st.integers(0, 40), bound=st.none() | st.integers(0, 4)
    )
    def start(self, limit, bound):
        self.limit, self.bound = limit, bound
        self.tickets = self.make()
        self.length = limit
        self.given: list[int] = []
        self.held: dict[int, str] = {}
        self.overtaken: dict[int, int] = {}
        self.finished: set[int] = set()
        self.lost: dict[int, str] = {}

    @rule(worker=WORKERS, count=st.integers(1, 3))
    def claim(self, worker, count):
        if self.tickets.is_over:
            return
        given = self.tickets.claim(worker, count)
        if isinstance(given, str):
            assert self.bound is not None
            if not self.held:  # Then the first waiting worker can claim.
                first = self.tickets.waiting[0]
                assert first != worker, f"stuck: {given}"
                assert given == f"it is the turn of {first}"
            return
        assert 1 <= len(given) <= count
        assert given == list(range(len(self.given), len(self.given) + len(given)))
        self.given += given
        self.held |= dict.fromkeys(given, worker)
        self.overtaken |= dict.fromkeys(given, 0)
        if self.bound is not None:
            others = len(self.held) - 1
            assert max(self.overtaken[s] for s in self.held) + others <= self.bound

    @rule(worker=WORKERS, data=st.data())
    def finish(self, worker, data):
        mine = [step for step, holder in self.held.items() if holder == worker]
        if not mine:
            return
        step = data.draw(st.sampled_from(mine))
        assert self.tickets.finish(worker, [step]) == []
        del self.held[step]
        self.finished.add(step)
        for other in self.held:
            self.overtaken[other] += 1
            assert self.bound is None or self.overtaken[other] <= self.bound

    @rule(worker=WORKERS, step=st.integers(0, 15))
    def finish_what_is_not_held(self, worker, step):
        if self.lost.get(step) == worker:  # It was only silent.
            assert self.tickets.finish(worker, [step]) == []
            del self.lost[step]
            self.finished.add(step)
            for other in self.held:
                self.overtaken[other] += 1
        elif self.held.get(step) != worker:
            assert self.tickets.finish(worker, [step]) == [step]

    @rule(worker=WORKERS)
    def die(self, worker):
        mine = {step for step, holder in self.held.items() if holder == worker}
        assert self.tickets.release(worker) == len(mine)
        self.lost |= dict.fromkeys(mine, worker)
        for step in mine:
            del self.held[step]

    @precondition(lambda self: len(self.given) > 8)
    @rule(length=st.none() | st.integers(5, 40))
    def end(self, length):
        self.tickets.end(length)
        length = len(self.given) if length is None else length
        self.length = length if self.length is None else min(self.length, length)
        self.held = {s: who for s, who in self.held.items() if s < self.length}
        self.lost = {s: who for s, who in self.lost.items() if s < self.length}

    @rule()
    def reload(self):
        self.tickets = reloaded(self.tickets)

    @invariant()
    def every_step_is_finished_held_or_lost(self):
        if not hasattr(self, "tickets"):
            return
        assert self.tickets.length == self.length
        assert self.tickets.lost == self.lost
        assert self.tickets.num_held == len(self.held)
        assert self.tickets.finished == len(self.finished)
        length = self.length if self.tickets.is_over else len(self.given)
        known = (
            {s for s in self.finished if s < length} | set(self.held) | set(self.lost)
        )
        assert known >= set(range(min(length, len(self.given))))


TestSteps = AnyOrderOfSteps.TestCase
TestSteps.settings = settings(max_examples=60, stateful_step_count=40)


def test_waiting_workers_take_turns():
    tickets = StepTickets(length=None, max_staleness=0)
    assert tickets.claim("a", 1) == [0]
    reason = "max_staleness=0: step 0 of a was overtaken by 0"
    assert tickets.claim("b", 1).startswith(reason)
    tickets.finish("a", [0])
    assert tickets.claim("a", 1) == "it is the turn of b"
    assert tickets.claim("b", 1) == [1]
    tickets.finish("b", [1])
    tickets.claim("b", 1)
    tickets.release("a")  # A released worker loses its turn.
    assert tickets.claim("b", 1) == [2]
