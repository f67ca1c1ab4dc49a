"""A job on parameter servers, as `ps_simulation.py` simulates it.

What decides is the code of `replicax.ps`, under a simulated clock: the board with its
tickets, heartbeats and barriers, the groups that number, count and order pushes, and
how often workers call. What takes time is simulated: cores, network cards, and the
interpreter's lock of a server. `Times` says how much, and `ps_service_times.py`
measures it. A worker goes on as `ps/worker_input.py` and `ps/strategy.py` have it.
"""

import dataclasses
import itertools
import math
from collections import Counter, deque
from typing import Any

import replicax  # noqa: F401 - It chooses JAX as Keras' backend.
from discrete_events import Event, Process, Shared, Turns, World, all_of
from replicax._util.waiting import back_off
from replicax.cluster.timeouts import Timeouts
from replicax.ps.board import Board
from replicax.ps.call_log import Sessions
from replicax.ps.groups import Group
from replicax.ps.limits import (
    beat_seconds,
    poll_pauses,
    steps_per_claim,
    watch_seconds,
)
from replicax.ps.streams import Claimed

__all__ = ["STREAM", "Cluster", "Job", "Times"]

STREAM = "fit 1/epoch/0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Service times: seconds of a core, and the same for each byte of a message.

    Attributes:
        call: Of a board's call at the server, but for what the board itself does.
        board: What the board does in a call, by method: without workers, for each.
        message: Of a push at the server, whatever its size.
        update_width: How many cores an update keeps busy.
        step: Core-seconds of a worker's step, but for messages; and its width.
    """

    call: float = 3e-4
    call_client: float = 3e-4
    board: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    message: float = 5e-4
    message_client: float = 5e-4
    receive: float = 3e-10
    send: float = 3e-10
    receive_client: float = 3e-10
    send_client: float = 3e-10
    update: float = 1e-4
    update_byte: float = 1e-9
    update_width: float = 1.0
    step: float = 0.0
    step_width: float = 1.0

    def of_board(self, method: str, num_workers: int) -> float:
        """Seconds of a whole call at the server."""
        base, each = self.board.get(method, (0.0, 0.0))
        return self.call + base + each * num_workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is simulated; see the script's options."""

    workers: int
    servers: int
    bytes: float
    step_seconds: float
    jitter: float = 0.05
    max_staleness: int | None = None
    overlap: bool = False
    cores: int = 16
    one_machine: bool = False
    others: float = 0.0
    gigabits: float = 25.0
    latency: float = 5e-5
    heartbeat: float = 30.0
    limit: int | None = None
    seed: int = 0


class Machine:
    """Cores, and a network card in each direction."""

    def __init__(self, world: World, job: Job, cores: "Shared | None" = None) -> None:
        self.card_bytes = job.gigabits * 1e9 / 8
        self.cores = cores or Shared(world, job.cores)
        self.sends, self.receives = (Shared(world, self.card_bytes) for _ in range(2))


class SimulatedGroup(Group):
    """A group without values: it admits, numbers, counts and orders pushes."""

    def _apply(self, gradients: Any) -> None:
        pass

    def state(self) -> Any:
        raise NotImplementedError("a simulated server is never restarted")


class Server:
    """One server: its machine, its interpreter's lock, and its part of the values."""

    def __init__(self, cluster: "Cluster", index: int) -> None:
        self.machine = cluster.machine()
        self.group = SimulatedGroup("group", index, Sessions())
        self._cluster = cluster
        self._python, self._updates = Turns(), Turns()
        self.board_used = self.python_used = self.updates_used = 0.0

    def in_python(self, seconds: float) -> Process:
        """Work that holds the interpreter's lock."""
        turn, end = self._python.take()
        yield turn
        yield self.machine.cores.use(seconds)
        self.python_used += seconds
        end.fire()

    def updated(self, seconds: float) -> Process:
        """An update, which begins when the one before has ended."""
        turn, end = self._updates.take()
        yield turn
        began = self._cluster.world.now
        yield self.machine.cores.use(seconds, self._cluster.times.update_width)
        self.updates_used += self._cluster.world.now - began
        end.fire()

    def pushed(self, worker: str, number: int, based_on: int) -> Process:
        """What a server does with a push, once it is there; its version then."""
        times, size = self._cluster.times, self._cluster.part_bytes
        yield from self.in_python(times.message)
        with self.group.lock:
            self.group.push(worker, worker, number, {}, based_on=based_on)
        version = self.group.version
        yield from self.updated(times.update + times.update_byte * size)
        return version


class Worker:
    """A worker, as `StepLeases` and `ParameterServerStrategy` have it go on."""

    def __init__(self, cluster: "Cluster", index: int) -> None:
        self.name = f"worker:{index}"
        self.machine = cluster.machine()
        self.steps = 0
        self._cluster, self._world, self._job = cluster, cluster.world, cluster.job
        self._device = Turns()
        self._versions = [0] * cluster.job.servers
        self._calls = itertools.count(1)
        self._ahead: deque[Any] = deque()
        self._pending: deque[Any] = deque()
        self._finished: list[Any] = []
        self._in_flight: Event | None = None
        self._claimed_at = 0.0, 0  # When, after how many steps.

    def call(self, method: str, **arguments: Any) -> Process:
        """A call of the board as this worker."""
        yield self.machine.cores.use(self._cluster.times.call_client)
        return (
            yield from self._cluster.on_board(
                method, worker=self.name, session=self.name, **arguments
            )
        )

    def beats(self) -> Process:
        """Heartbeats, for as long as the job goes on."""
        between = beat_seconds(self._job.workers, self._job.heartbeat)
        yield self._world.sleep(self._world.random.random() * between)
        while True:
            yield from self.call("beat")
            yield self._world.sleep(between)

    def train(self) -> Process:
        """`fit`: tickets, steps, pushes."""
        job, bounded = self._job, self._job.max_staleness is not None
        yield self._world.sleep(self._world.random.random() * job.step_seconds)
        while True:
            if not self._ahead and not (yield from self._claim()):
                break
            if bounded:
                yield from self._pull()
            self._cluster.began = min(self._cluster.began, self._world.now)
            self._pending.append(self._ahead.popleft())
            based_on, computed = (
                list(self._versions),
                self._world.start(self._compute()),
            )
            yield from self._settle()
            push = self._push(based_on, computed)
            self._in_flight = self._world.start(push)
            if not job.overlap:
                yield from self._settle()
        yield from self._settle()
        if self._finished:
            yield from self.call(
                "finish", stream=STREAM, call=next(self._calls), indices=self._finished
            )
        ended = self._world.now
        for name in ("end of epoch", "values"):
            yield from self._meet(name)
        return ended

    def _meet(self, barrier: str) -> Process:
        """A barrier: ask again until all are there."""
        pause = back_off(*poll_pauses(self._job.workers))
        while (yield from self.call("arrive", barrier=barrier)):
            yield self._world.sleep(next(pause))

    def _claim(self) -> Process:
        """Tickets for the next steps; whether there are any."""
        job, count = self._job, 1
        pause = back_off(*poll_pauses(job.workers))
        if job.max_staleness is None:
            left = None if job.limit is None else job.limit - self._cluster.frontier
            count = steps_per_claim(job.workers, self._pace(), left)
        while True:
            if job.max_staleness is not None:
                yield from self._settle()
            finished, self._finished = self._finished, []
            answer = yield from self.call(
                "claim",
                stream=STREAM,
                call=next(self._calls),
                count=count,
                finished=finished,
            )
            if answer.wait is None:
                self._ahead.extend(answer.indices)
                return not answer.is_over
            yield from self._settle()
            yield self._world.sleep(next(pause))

    def _pace(self) -> float:
        """Seconds of a step since the last tickets."""
        (now, made), before = (self._world.now, self.steps), self._claimed_at
        self._claimed_at = now, made
        return (now - before[0]) / (made - before[1]) if made > before[1] else math.inf

    def _compute(self) -> Process:
        times, job = self._cluster.times, self._job
        turn, end = self._device.take()
        yield turn
        if job.step_seconds:
            jitter = 1 + job.jitter * self._world.random.uniform(-1, 1)
            yield self._world.sleep(job.step_seconds * jitter)
        yield self.machine.cores.use(times.step, times.step_width)
        end.fire()

    def _settle(self) -> Process:
        """Wait for the push that is under way."""
        if self._in_flight is not None:
            flight, self._in_flight = self._in_flight, None
            self._versions = yield flight
            self.steps += 1
            self._finished.append(self._pending.popleft())

    def _push(self, based_on: list[int], computed: Event) -> Process:
        yield computed
        number = self.steps + 1
        pushes = [
            self._push_to(server, number, version)
            for server, version in zip(self._cluster.servers, based_on, strict=True)
        ]
        return (yield from all_of([self._world.start(push) for push in pushes]))

    def _push_to(self, server: Server, number: int, based_on: int) -> Process:
        times = self._cluster.times
        yield self.machine.cores.use(times.message_client)
        yield from self._travel(
            self.machine, server.machine, times.send_client, times.receive
        )
        answer = yield from server.pushed(self.name, number, based_on)
        yield from self._travel(
            server.machine, self.machine, times.send, times.receive_client
        )
        return answer

    def _travel(
        self, source: Machine, target: Machine, send: float, receive: float
    ) -> Process:
        """Bytes of the values go from one machine to the other, piece by piece."""
        size = self._cluster.part_bytes
        yield self._world.sleep(self._job.latency)
        jobs = [source.cores.use(send * size), target.cores.use(receive * size)]
        if not self._job.one_machine:
            jobs.append(source.sends.use(size, source.card_bytes))
            jobs.append(target.receives.use(size, target.card_bytes))
        yield from all_of(jobs)

    def _pull(self) -> Process:
        """The newest values of all servers."""
        times = self._cluster.times

        def pull_from(server: Server) -> Process:
            yield self.machine.cores.use(times.message_client)
            yield from server.in_python(times.message)
            version = server.group.version
            yield from self._travel(
                server.machine, self.machine, times.send, times.receive_client
            )
            return version

        pulls = [
            self._world.start(pull_from(server)) for server in self._cluster.servers
        ]
        self._versions = yield from all_of(pulls)


class Cluster:
    """A job's workers and servers, and what they have done."""

    def __init__(self, job: Job, times: Times) -> None:
        self.job, self.times = job, times
        self.world = World(job.seed)
        self.part_bytes = job.bytes / job.servers
        self._one = (
            Shared(self.world, job.cores, job.others) if job.one_machine else None
        )
        self.servers = [Server(self, i) for i in range(job.servers)]
        self.workers = [Worker(self, i) for i in range(job.workers)]
        names = [worker.name for worker in self.workers]
        timeouts = Timeouts(heartbeat=job.heartbeat)
        self.board = Board(names, timeouts, now=self.world)
        self.calls: Counter[str] = Counter()
        self.began = float("inf")  # When the first step began.
        self.trained: list[Event] = []  # Each worker's end, and when its steps ended.
        self.frontier = 0

    def machine(self) -> Machine:
        """A machine of its own, or the one that all are on."""
        return Machine(self.world, self.job, self._one)

    def on_board(self, method: str, **arguments: Any) -> Process:
        """A call of the real board, on server 0."""
        server, seconds = self.servers[0], self.times.of_board(method, self.job.workers)
        yield self.world.sleep(self.job.latency)
        yield from server.in_python(seconds)
        server.board_used += seconds
        self.calls[method] += 1
        answer = getattr(self.board, method)(**arguments)
        if isinstance(answer, Claimed) and answer.indices:
            self.frontier = max(self.frontier, answer.indices[-1])
        yield self.world.sleep(self.job.latency)
        return answer

    @property
    def staleness(self) -> Counter[int]:
        """How many pushes were applied with which staleness, as servers count."""
        total: Counter[int] = Counter()
        for server in self.servers:
            for histogram in server.group.staleness.values():
                total.update(histogram)
        return total

    def _watches(self) -> Process:
        """What another server does: it asks for the end of the job."""
        while True:
            yield from self.on_board("get", key="the job is over")
            yield from self.on_board("failed")
            yield self.world.sleep(watch_seconds(self.job.servers))

    def start(self) -> None:
        """Have all processes begin; `world.run` lets them go on."""
        job = self.job
        for worker in self.workers:
            self.board.join(worker.name, worker.name)
        self.board.open(STREAM, limit=job.limit, max_staleness=job.max_staleness)
        self.trained = [self.world.start(worker.train()) for worker in self.workers]
        for worker in self.workers:
            self.world.start(worker.beats())
        for _ in self.servers[1:]:
            self.world.start(self._watches())
