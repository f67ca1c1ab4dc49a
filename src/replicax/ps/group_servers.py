"""A worker's messages to the servers of one group, and its pushes.

- The thread of a server's connection sends messages one after another. One that had no
  answer is sent again.
- A push has a number, by which a server applies it once, however often it comes.
- The servers answer a push each for itself. Until `GroupPush.answers` some may have
  applied it, and others not.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeAlias

import msgspec

from replicax._util.types import JSONObject, PyTree
from replicax.errors import ClusterError
from replicax.ps.connection import Connection, ServerRefused, ValuesLostError
from replicax.ps.messages import Commit, Pull, Push, PushRows
from replicax.ps.partition import VariableGroup
from replicax.ps.session import Session

__all__ = [
    "Answer",
    "GroupPush",
    "GroupServers",
    "Vectors",
    "exchange_push",
    "require_all_known",
]

Vectors: TypeAlias = dict[str, PyTree]
Answer: TypeAlias = tuple[JSONObject, Vectors]
"""The header and the vectors of a server's answer."""

_SLACK_SECONDS = 10.0


def require_all_known(
    worker: str, name: str, answers: Mapping[int, JSONObject]
) -> None:
    """Raise if servers have trained values of a group, and others have made it anew.

    `answers` are those to its creation, by server. Where it was trained, it was created
    on all of them: a server to which it is new has lost its values.
    """
    trained = [server for server, said in answers.items() if said["version"]]
    new = [server for server, said in answers.items() if said["is_new"]]
    if trained and new:
        raise ValuesLostError(
            f"{worker}: ps:{new[0]} has lost its values: {name!r} is new there, and "
            f"ps:{trained[0]} has trained values. Start the job again, without the "
            "servers' snapshots if there are some; with snapshot_dir=... a restarted "
            "server goes on from its own.",
            culprit=f"ps:{new[0]}",
        )


def exchange_push(
    session: Session,
    connection: Connection,
    message: Push | PushRows,
    vectors: Vectors,
) -> Answer:
    """Exchange a push; an error names who has not brought a part of its step."""
    share, step = message.share, session.timeouts.step
    # The server says first when other workers' parts do not come in time. A push of
    # rows has longer than a pull, for which a program waits: it may be large.
    seconds = step if share is None else step + _SLACK_SECONDS
    try:
        return connection.exchange(message, vectors, reply_timeout_seconds=seconds)
    except ServerRefused as refused:
        if share is None or refused.kind != "SyncTimeout":
            raise
        raise ClusterError(
            f"{session.name}: {session.absent()} did not bring a part of step "
            f"{share.step} within {step:.0f} s. See what it prints, or give it more "
            "time (rx.Timeouts(step=...))."
        ) from refused


class GroupServers:
    """The servers of one group, whose `numbers` are in order."""

    def __init__(self, session: Session, placement: VariableGroup) -> None:
        self.session = session
        self.name = placement.name
        self.numbers = placement.servers

    def submit(
        self, server: int, use: Callable[[Connection], Answer]
    ) -> Future[Answer]:
        """Queue a call for the thread of a server's connection."""
        return self.session.connections[server].submit(use)

    def ask(
        self, server: int, message: msgspec.Struct, vectors: Vectors | None = None
    ) -> Future[Answer]:
        """Exchange a message with a server."""
        return self.submit(server, lambda x: x.exchange(message, vectors))

    def ask_all(
        self,
        message: msgspec.Struct | Mapping[int, msgspec.Struct],
        vectors: Mapping[int, Vectors] | None = None,
    ) -> dict[int, Answer]:
        """Exchange a message with all servers, or each its own; answers by server."""
        asked = {}
        for server in self.numbers:
            own = message if isinstance(message, msgspec.Struct) else message[server]
            asked[server] = self.ask(server, own, (vectors or {}).get(server))
        return self.results(asked)

    def results(self, futures: Mapping[int, Future[Answer]]) -> dict[int, Answer]:
        """Wait for answers, by server."""
        return {server: self.session.result(x) for server, x in futures.items()}


class GroupPush:
    """A push to all servers of a group, which is under way.

    `messages` are by server; `vectors` makes a server's, on its connection's thread.
    """

    def __init__(
        self,
        servers: GroupServers,
        messages: Mapping[int, Push],
        vectors: Callable[[int], Vectors],
    ) -> None:
        self._servers = servers
        self._session = servers.session
        self._messages = messages
        self._vectors = vectors
        self._incarnations: dict[int, str] = {}  # Of servers, as they got the push.
        self.futures = {server: self._send(server) for server in messages}

    def _send(self, server: int) -> Future[Answer]:
        return self._servers.submit(server, functools.partial(self._exchange, server))

    def _exchange(self, server: int, connection: Connection) -> Answer:
        message = self._messages[server]
        vectors = self._vectors(server)  # Here the thread waits for the step's values.
        answer = exchange_push(self._session, connection, message, vectors)
        self._incarnations[server] = connection.incarnation
        return answer

    def answers(self, *, stays: bool | None) -> dict[int, Answer]:
        """Wait for the servers' answers; see `RemoteGroup.finish`."""
        answers = self._servers.results(self.futures)
        first = self._servers.numbers[0]
        message = self._messages[first]
        if stays is None:
            stays = answers[first][0]["applied"]
        if message.share is not None and (stays or not message.may_leave):
            self._await_end(message.share.step, answers)
        return answers

    def _await_end(self, step: int, answers: dict[int, Answer]) -> None:
        """Poll until a synchronous step is applied; `answers` get the last replies.

        Servers need a second round for a step that is clipped by its norm: a commit,
        of whichever worker has the norms of all. Where the step is over on some server,
        who ended it may have died before the other servers heard of it.
        """
        name = self._servers.name

        def poll() -> bool | None:
            norms = [said["squared_norms"] for said, _ in answers.values()]
            commit: Commit | None = None
            if None not in norms:  # Else parts are missing: of a restarted server, too.
                total: Counter[str] = Counter()
                for each in norms:
                    total.update(each)
                commit = Commit(name, step, dict(total))
            asked = {}
            for server, (said, _) in answers.items():
                if said["is_over"]:
                    continue
                if self._has_forgotten(server):
                    asked[server] = self._send(server)
                    continue
                message = commit or Pull(name, said["version"], step)
                asked[server] = self._servers.ask(server, message)
            for server, future in asked.items():
                answers[server] = self._end_of(server, future, answers[server])
            return all(said["is_over"] for said, _ in answers.values()) or None

        self._session.wait(
            poll, f"the end of step {step} of {name!r}", self._session.absent
        )

    def _has_forgotten(self, server: int) -> bool:
        """Whether a server was restarted since, without the parts of the step."""
        now = self._session.connections[server].incarnation
        return now != self._incarnations[server]

    def _end_of(self, server: int, asked: Future[Answer], before: Answer) -> Answer:
        """Take a server's answer on the progress of a step."""
        try:
            newer, vectors = self._session.result(asked)
        except ServerRefused as refused:
            if refused.kind != "IncompleteStep":
                raise
            # It was restarted before the commit, and has forgotten the parts.
            newer, vectors = self._session.result(self._send(server))
        return before[0] | newer, vectors or before[1]
