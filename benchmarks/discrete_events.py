"""A discrete-event simulation: a clock, processes, and what they share.

A process is a generator that yields the events it waits for:

    >>> world = World(seed=0)
    >>> def process():
    ...     yield world.sleep(2.0)
    ...     return f"it is {world():g}"
    >>> end = world.start(process())
    >>> world.run(10.0)
    >>> end.value
    'it is 2'
"""

import heapq
import itertools
import random
from collections.abc import Callable, Generator, Iterable
from typing import Any

__all__ = ["Event", "Process", "Shared", "Turns", "World", "all_of"]


class Event:
    """Something that happens once, and that processes wait for."""

    def __init__(self) -> None:
        self.is_over = False
        self.value: Any = None
        self._then: list[Callable[[Any], None]] = []

    def then(self, call: Callable[[Any], None]) -> None:
        """Call it with the event's value, now or later."""
        if self.is_over:
            call(self.value)
        else:
            self._then.append(call)

    def fire(self, value: Any = None) -> None:
        """Let it happen."""
        self.is_over, self.value = True, value
        for call in self._then:
            call(value)


Process = Generator[Event, Any, Any]


class World:
    """The simulated clock, which is called for the time, and all that will happen."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call it at that time."""
        heapq.heappush(self._queue, (time, next(self._numbers), call))

    def sleep(self, seconds: float) -> Event:
        """It happens after so long."""
        event = Event()
        self.at(self.now + seconds, event.fire)
        return event

    def start(self, process: Process) -> Event:
        """Run a process, which yields the events that it waits for; its end."""
        end = Event()

        def go_on(value: Any) -> None:
            try:
                event = process.send(value)
            except StopIteration as stop:
                end.fire(stop.value)
                return
            event.then(go_on)

        go_on(None)
        return end

    def run(self, until: float) -> None:
        """Let everything happen up to that time."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = until


def all_of(events: Iterable[Event]) -> Process:
    """Wait for all of them; their values."""
    values = []
    for event in events:
        values.append((yield event))
    return values


class Shared:
    """Cores, or a network card, that jobs share evenly.

    A job of width w gets at most w of the capacity: threads of the cores, or all of the
    card's bytes per second. All progress at the same rate per width, so one number, the
    progress of a job that was there from the beginning, tells when each one ends.
    """

    def __init__(self, world: World, capacity: float, others: float = 0.0) -> None:
        self.used = 0.0
        self._world, self._capacity = world, capacity
        self._others = self._width = others  # Width of what is not simulated.
        self._progress = self._since = 0.0
        self._jobs: list[tuple[float, int, float, Event]] = []
        self._numbers = itertools.count()
        self._planned = 0

    def use(self, amount: float, width: float = 1.0) -> Event:
        """Do a job: so many core-seconds, or bytes."""
        event = Event()
        if amount <= 0:
            event.fire()
            return event
        self._advance()
        end = self._progress + amount / width
        heapq.heappush(self._jobs, (end, next(self._numbers), width, event))
        self._width += width
        self._plan()
        return event

    @property
    def _rate(self) -> float:
        return min(1.0, self._capacity / self._width)

    def _advance(self) -> None:
        if self._jobs:
            gone = (self._world.now - self._since) * self._rate
            self._progress += gone
            self.used += gone * (self._width - self._others)
        self._since = self._world.now

    def _plan(self) -> None:
        if not self._jobs:
            return
        self._planned += 1
        left = max(0.0, self._jobs[0][0] - self._progress) / self._rate
        self._world.at(
            self._world.now + left, lambda plan=self._planned: self._end(plan)
        )

    def _end(self, plan: int) -> None:
        if plan != self._planned:
            return  # Another job has come since.
        self._advance()
        self._progress = self._jobs[0][0]  # As it is, but for rounding.
        ended = []
        while self._jobs and self._jobs[0][0] <= self._progress:
            _, _, width, event = heapq.heappop(self._jobs)
            self._width -= width
            ended.append(event)
        self._plan()
        for event in ended:
            event.fire()


class Turns:
    """A lock that is given in the order in which it was asked for."""

    def __init__(self) -> None:
        self._last = Event()
        self._last.fire()

    def take(self) -> tuple[Event, Event]:
        """When it is one's turn; and what to fire at its end."""
        turn, self._last = self._last, Event()
        return turn, self._last
