"""A worker's client of one group: pulls values from servers, pushes gradients."""

import dataclasses
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from replicax._util.types import JSONObject, PyTree
from replicax.errors import ClusterError, ClusterMismatchError
from replicax.ps.connection import Connection, ServerRefused
from replicax.ps.session import Session
from replicax.ps.variable_slices import VariableGroup

__all__ = ["PushResult", "RemoteGroup", "ServerPushes", "WorkerShare"]

_SLACK_SECONDS = 10.0
"""For the server to say first that other workers' shares did not come in time."""
_logger = logging.getLogger("replicax")
_Vectors = dict[str, PyTree]
_Answer = tuple[int, JSONObject, _Vectors]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerShare:
    """A worker's part of a synchronous step.

    Attributes:
        step: The step, counted from the epoch's start; None: the group's next one.
        part: Which part this is.
        num_parts: How many the step has.
        weight: How much the part counts in a mean, such as its examples; None: parts
            are summed.
    """

    step: int | None
    part: int
    num_parts: int
    weight: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushResult:
    """What became of a push.

    Attributes:
        counts: Whether it is in the values. A synchronous part that another worker had
            brought already is not.
        staleness: Most updates that any server applied between the pull and this push.
    """

    counts: bool
    staleness: int


class RemoteGroup:
    """A group on the servers, with the newest values that this worker has seen.

    Args:
        session: This worker's session.
        group: What lies where.
        sharding: Of the values on this worker's devices.
        compression: Dtype in which float32 gradients travel, such as `"bfloat16"`.

    Attributes:
        values: The newest values known here, in the order of the group's variables.
        versions: Of `values`, by server.
    """

    def __init__(
        self,
        session: Session,
        group: VariableGroup,
        sharding: NamedSharding,
        compression: str | None = None,
    ) -> None:
        self.group = group
        self.values: list[jax.Array] = []
        self.versions: dict[int, int] = {}
        self.num_assigned = 0  # Versions that were assigned, as the chief counts.
        self._session = session
        self._sharding = sharding
        self._compression = compression
        self._servers = sorted({part.server for part in group.parts})
        self._incarnations: dict[int, str] = {}  # Of the servers, with `versions`.
        self._behind: dict[int, int] = {}  # Version before a server went back, by it.
        self._was_restarted = False
        self._held: dict[int, _Vectors] = {}
        self._sequence = 0
        self._pack = jax.jit(self._packed)
        self._unpack = jax.jit(self._unpacked, out_shardings=sharding)

    # The beginning.

    def create(self, values: Sequence[jax.Array]) -> None:
        """Bring the initial values to the servers; they keep those that they have."""
        for server, vectors in zip(
            self._servers, self._pack_values(values), strict=True
        ):
            self._on(server, {"op": "create", "group": self.group.to_json()}, vectors)
        self._session.board("put", key=self._key, value={"digest": self.group.digest})

    def is_created(self) -> bool:
        """Whether the chief has created the group."""
        return self._session.board("get", key=self._key) is not None

    def require_created(self) -> None:
        """Wait for the chief to create the group, and compare it with this one.

        Raises:
            ClusterMismatchError: If the chief's is another one.
        """
        created = self._session.get(self._key, f"{self.group.name!r}: initial values")
        if created["digest"] != self.group.digest:
            raise ClusterMismatchError(
                f"{self._session.name}: {self.group.name!r} differs from the chief's: "
                f"here it is of {len(self.group.parts)} parts, first "
                f"{self.group.parts[0]}. All tasks must run the same script with the "
                "same arguments and versions."
            )

    # Values.

    def pull(self) -> bool:
        """Get what has changed since this worker looked last; whether anything has."""
        pulls = [
            self._session.submit(server, functools.partial(self._pull_from, server))
            for server in self._servers
        ]
        return self._take([self._session.result(pull) for pull in pulls])

    def has_begun(self, step: int) -> bool:
        """Whether the values are those that a synchronous step begins with, or later.

        A restarted server may have none of these; the step's gradients bring it there.
        """
        return all(
            version >= step or server in self._behind
            for server, version in self.versions.items()
        )

    def has_ended(self, step: int) -> bool:
        """Whether a synchronous step is over: at any server, as it soon is at the rest.

        After a restart one may have given up a step which others still wait for.
        """
        decisive = min if self._was_restarted else max
        return decisive(self.versions.values()) > step

    def assign_rate(self, rate: float) -> None:
        """Give the servers' optimizers another learning rate."""
        for server in self._servers:
            self._on(
                server,
                {
                    "op": "assign",
                    "group": self.group.name,
                    "name": "learning_rate",
                    "value": rate,
                },
            )

    def assign(self, values: Sequence[jax.Array]) -> None:
        """Replace the servers' values."""
        for server, vectors in zip(
            self._servers, self._pack_values(values), strict=True
        ):
            self._on(server, {"op": "replace", "group": self.group.name}, vectors)
        self.num_assigned += 1
        self.pull()

    def averages(self) -> list[jax.Array] | None:
        """The servers' moving averages of the values; None: the optimizer has none."""
        answers = [
            self._on(server, {"op": "averages", "group": self.group.name})
            for server in self._servers
        ]
        if not all(header["found"] for header, _ in answers):
            return None
        return self._unpack(
            [
                {d: jax.device_put(v, self._sharding) for d, v in vectors.items()}
                for _, vectors in answers
            ]
        )

    def push(
        self,
        gradients: Sequence[jax.Array],
        based_on: Mapping[int, int],
        part: WorkerShare | None = None,
    ) -> "ServerPushes":
        """Send gradients, and bring the newest values; `finish` waits for it.

        Args:
            gradients: One for each variable, equal on all of this worker's replicas.
            based_on: `versions` when the values that they are of were the newest.
            part: Of a synchronous step; None: to be applied at once.
        """
        packed = self._pack([x.addressable_data(0) for x in gradients])
        self._sequence += 1
        header = {
            "op": "push",
            "group": self.group.name,
            "worker": self._session.name,
            "session": self._session.id,
            "sequence": self._sequence,
            "deadline_seconds": self._session.timeouts.step,
            "part": None if part is None else dataclasses.asdict(part),
        }
        futures = [
            self._session.submit(
                server,
                functools.partial(
                    self._push_to,
                    server,
                    header | {"based_on": based_on[server]},
                    vectors,
                ),
            )
            for server, vectors in zip(self._servers, packed, strict=True)
        ]
        return ServerPushes(futures, part)

    def finish(self, push: "ServerPushes") -> PushResult:
        """Wait for a push, and take over the values it brought."""
        answers = [self._session.result(future) for future in push.futures]
        norms = [header["squared_norms"] for _, header, _ in answers]
        if all(n is not None for n in norms):
            # Servers ask for norms in a synchronous step only.
            assert push.part is not None
            assert push.part.step is not None
            answers = self._commit(push.part.step, norms, answers)
        elif any(n is not None for n in norms):
            # Another worker has all the norms and is finishing the step.
            answers = [
                answer if n is None else self._newer(*answer)
                for answer, n in zip(answers, norms, strict=True)
            ]
        self._take(answers)
        return PushResult(
            # Servers may have got it from different workers; the first one decides.
            counts=answers[0][1]["applied"],
            staleness=max(header["staleness"] for _, header, _ in answers),
        )

    def _newer(self, server: int, header: JSONObject, _: _Vectors) -> _Answer:
        """A server's values after the version in `header`, once it has them."""
        pull = {"op": "pull", "group": self.group.name, "have": header["version"]}

        def poll() -> _Answer | None:
            answer, vectors = self._on(server, pull)
            return (server, header | answer, vectors) if vectors else None

        return self._session.wait(
            poll, f"the end of a step of {self.group.name!r}", lambda: "another worker"
        )

    def _commit(
        self, step: int, norms: list[dict[str, float]], answers: list[_Answer]
    ) -> list[_Answer]:
        """The second round of a synchronous step that is clipped by its norm."""
        total: dict[str, float] = {}
        for each in norms:
            for key, value in (each or {}).items():
                total[key] = total.get(key, 0.0) + value
        results = []
        for server, header, _ in answers:
            answer, vectors = self._on(
                server,
                {
                    "op": "commit",
                    "group": self.group.name,
                    "step": step,
                    "squared_norms": total,
                },
            )
            results.append((server, header | answer, vectors))
        return results

    def _take(self, answers: Sequence[_Answer]) -> bool:
        """Take over the values that servers sent; whether there were any."""
        changed = False
        for server, header, vectors in answers:
            before = self.versions.get(server, 0)
            if header["version"] < before:
                self._behind[server] = before
            self._meet(server)
            self.versions[server] = header["version"]
            if header["version"] >= self._behind.get(server, 0):
                self._behind.pop(server, None)
            if vectors:
                self._held[server] = vectors
                changed = True
        if changed or not self.values:
            held = [
                {d: jax.device_put(v, self._sharding) for d, v in vectors.items()}
                for vectors in (self._held[server] for server in self._servers)
            ]
            self.values = self._unpack(held)
        return changed

    # Messages.

    @property
    def _key(self) -> str:
        return f"group {self.group.name}"

    def _on(
        self, server: int, header: JSONObject, vectors: _Vectors | None = None
    ) -> tuple[JSONObject, _Vectors]:
        """Exchange a message with a server, in its turn, and wait."""
        return self._session.result(
            self._session.submit(
                server, lambda connection: _exchange(connection, header, vectors)
            )
        )

    def _pull_from(self, server: int, connection: Connection) -> _Answer:
        header = {
            "op": "pull",
            "group": self.group.name,
            "have": self.versions.get(server),
        }
        began = time.perf_counter()
        answer, vectors = _exchange(connection, header)
        self._session.exchange_s[server] += time.perf_counter() - began
        known = self._incarnations.get(server)
        if not vectors and known not in (None, self._session.incarnations[server]):
            # Restored: what this worker has is of no version there.
            answer, vectors = _exchange(connection, header | {"have": None})
        return server, answer, vectors

    def _meet(self, server: int) -> None:
        now = self._session.incarnations[server]
        if self._incarnations.setdefault(server, now) != now:
            self._incarnations[server] = now
            self._was_restarted = True
            _logger.warning(
                "ps:%d was restarted from a snapshot; its log says how many updates "
                "of %s are lost.",
                server,
                self.group.name,
            )

    def _push_to(
        self,
        server: int,
        header: JSONObject,
        vectors: _Vectors,
        connection: Connection,
    ) -> _Answer:
        # Here the thread waits for the step to be computed.
        host = {dtype: np.asarray(v) for dtype, v in vectors.items()}
        step = self._session.timeouts.step
        began = time.perf_counter()
        try:
            # The server says first when other workers' parts do not come in time.
            answer = _exchange(connection, header, host, step + _SLACK_SECONDS)
        except ServerRefused as refused:
            if refused.kind != "SyncTimeout":
                raise
            raise ClusterError(
                f"{self._session.name}: {self._session.absent()} did not bring a part "
                f"of step {header['part']['step']} within {step:.0f} s. See what it "
                "prints, or give it more time (rx.Timeouts(step=...))."
            ) from refused
        self._session.exchange_s[server] += time.perf_counter() - began
        return server, *answer

    # Between variables and flat vectors.

    def _pack_values(self, values: Sequence[jax.Array]) -> list[_Vectors]:
        packed = jax.jit(functools.partial(self._packed, compress=False))(
            [x.addressable_data(0) for x in values]
        )
        return [{d: np.asarray(v) for d, v in vectors.items()} for vectors in packed]

    def _packed(self, values: list[jax.Array], compress: bool = True) -> list[_Vectors]:
        return [self._vectors(values, server, compress) for server in self._servers]

    def _vectors(
        self, values: list[jax.Array], server: int, compress: bool
    ) -> _Vectors:
        vectors = self.group.layout_on(server).pack(
            values[part.variable]
            if part.rows is None
            else values[part.variable][slice(*part.rows)]
            for part in self.group.slices_on(server)
        )
        if compress and self._compression and "float32" in vectors:
            vectors["float32"] = vectors["float32"].astype(self._compression)
        return vectors

    def _unpacked(self, held: list[_Vectors]) -> list[jax.Array]:
        unpacked = {
            server: iter(self.group.layout_on(server).unpack(vectors))
            for server, vectors in zip(self._servers, held, strict=True)
        }
        pieces: dict[int, list[jax.Array]] = {}
        for part in self.group.parts:  # Rows of a variable are in order.
            pieces.setdefault(part.variable, []).append(next(unpacked[part.server]))
        return [
            found[0] if len(found) == 1 else jnp.concatenate(found)
            for _, found in sorted(pieces.items())
        ]


@dataclasses.dataclass(frozen=True)
class ServerPushes:
    """The pushes of one step to all servers."""

    futures: list[Future[_Answer]]
    part: WorkerShare | None


def _exchange(
    connection: Connection,
    header: JSONObject,
    vectors: Mapping[str, np.ndarray] | None = None,
    reply_timeout_seconds: float | None = None,
) -> tuple[JSONObject, _Vectors]:
    try:
        return connection.exchange(
            header, vectors, reply_timeout_seconds=reply_timeout_seconds
        )
    except ServerRefused as refused:
        if refused.kind in ("UnknownGroup", "UnknownGroupMessage"):
            raise ClusterError(
                f"{connection.task} at {connection.address} has lost its values: it "
                "was restarted without a snapshot that has them. Start the job again; "
                "with snapshot_dir=... a restarted server goes on.",
                culprit=connection.task,
            ) from refused
        if refused.kind == "Superseded":
            raise ClusterError(
                f"{connection.task} refuses to go on: {refused}",
                culprit=connection.task,
            ) from refused
        raise
