"""An engine process without a model that gives every request the same answer."""

from __future__ import annotations

from multiprocessing.connection import Connection

from sgl_prefix_attn.offline.answers import Answer, Choice
from sgl_prefix_attn.offline.engines import EngineArguments, Outcome, Ready


def main(connection: Connection, arguments: EngineArguments) -> None:
    connection.send(Ready(400))
    while (task := connection.recv()) is not None:
        connection.send(Outcome(task.number, Answer((Choice((1,), None, "length"),), len(task.tokens))))
