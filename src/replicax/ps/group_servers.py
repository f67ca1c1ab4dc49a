"""A worker's messages to the servers of one group.

The thread of a server's connection sends messages one after another, and retries a
message until the server answers.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

import msgspec

from replicax._util.types import PyTree
from replicax.ps.connection import Connection, ValuesLostError
from replicax.ps.messages import Created, Message, TableCreated
from replicax.ps.partition import VariableGroup
from replicax.ps.session import Session

__all__ = ["Answer", "GroupServers", "Vectors", "require_all_known"]

Vectors: TypeAlias = dict[str, PyTree]
_Answer = TypeVar("_Answer", bound=msgspec.Struct)
_AnyAnswer = TypeVar("_AnyAnswer")
Answer: TypeAlias = tuple[_Answer, Vectors]
"""A server's answer and its vectors."""


def require_all_known(
    worker: str, name: str, answers: Mapping[int, Created | TableCreated]
) -> None:
    """Raise if some servers have trained values of a group, and others just created it.

    `answers` are the answers to `Create`, by server. A trained group exists on all
    servers, so a server that has just created the group has lost its values.
    """
    trained = [server for server, answer in answers.items() if answer.version]
    new = [server for server, answer in answers.items() if answer.is_new]
    if trained and new:
        raise ValuesLostError(
            f"{worker}: ps:{new[0]} has lost its values: {name!r} is new there, and "
            f"ps:{trained[0]} has trained values. Start the job again, without the "
            "servers' snapshots if there are some; with snapshot_dir=... a restarted "
            "server goes on from its own.",
            culprit=f"ps:{new[0]}",
        )


class GroupServers:
    """The servers of one group, whose `numbers` are in order."""

    def __init__(self, session: Session, placement: VariableGroup) -> None:
        self.session = session
        self.numbers = placement.servers

    def submit(
        self, server: int, use: Callable[[Connection], _AnyAnswer]
    ) -> Future[_AnyAnswer]:
        """Queue a call for the thread of a server's connection."""
        return self.session.connections[server].submit(use)

    def ask_all(
        self,
        message: Message[_Answer] | Mapping[int, Message[_Answer]],
        vectors: Mapping[int, Vectors] | None = None,
    ) -> dict[int, Answer[_Answer]]:
        """Exchange one message, or one per server; return answers by server."""
        futures = {}
        for server in self.numbers:
            own = message if isinstance(message, Message) else message[server]
            sent = (vectors or {}).get(server)
            futures[server] = self.submit(
                server, lambda x, own=own, sent=sent: x.exchange(own, sent)
            )
        return self.results(futures)

    def results(
        self, futures: Mapping[int, Future[_AnyAnswer]]
    ) -> dict[int, _AnyAnswer]:
        """Wait for answers, by server."""
        return {server: self.session.result(x) for server, x in futures.items()}
