"""Clients of a board: everything goes in and comes out as JSON."""

import inspect
import json
from typing import Any

import msgspec

from replicax.cluster.timeouts import Timeouts
from replicax.ps.board import Board
from replicax.ps.call_log import Sessions

NAMES = ["worker:0", "worker:1", "worker:2"]
TIMEOUTS = Timeouts(startup=100, heartbeat=10, chief=100)
STREAM = "fit 0/epoch/0"


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Client:
    """One process of a worker; numbers its calls and goes through JSON."""

    def __init__(self, board, worker, session):
        self.board, self.worker, self.session = board, worker, session
        self.call = 0

    def __call__(self, name, /, **arguments):
        if "worker" in inspect.signature(getattr(Board, name)).parameters:
            arguments |= {"worker": self.worker, "session": self.session}
        if "call" in inspect.signature(getattr(Board, name)).parameters:
            self.call += 1
            arguments = {"call": self.call} | arguments
        return ask(self.board, name, **arguments)


def ask(board, name, /, **arguments):
    assert name in Board.ANSWERS
    arguments = json.loads(json.dumps(arguments))
    answer = msgspec.to_builtins(getattr(board, name)(**arguments))
    return json.loads(json.dumps(answer))


def streams_of(board):
    """The tickets of each open stream, with the number of held steps."""
    return {
        stream["name"]: stream["tickets"]
        | {"held": sum(map(len, stream["tickets"]["held"].values()))}
        for stream in board.state()["streams"]["newest"].values()
    }


def serve_streams():
    """Let clients of the boards in this process call `streams`."""
    Board.streams = streams_of
    Board.ANSWERS["streams"] = Any


def restarted(names, timeouts, state, wal=None, **options):
    """A board that was restored from a snapshot and the write-ahead log."""
    sessions = Sessions(*([options["append"]] if "append" in options else []))
    sessions.load_state({}, wal or {})
    board = Board(names, timeouts, sessions, **options)
    board.load_state(json.loads(json.dumps(state)), wal)
    return board
