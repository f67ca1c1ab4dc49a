"""Clients of a board: everything goes in and comes out as JSON."""

import inspect
import json

from replicax.cluster.timeouts import Timeouts
from replicax.ps.board import Board

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
    assert name in Board.ACTIONS
    arguments = json.loads(json.dumps(arguments))
    return json.loads(json.dumps(getattr(board, name)(**arguments)))
