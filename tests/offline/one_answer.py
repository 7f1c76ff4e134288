"""An engine process without a model that gives every request the same answer."""

from __future__ import annotations

from multiprocessing.connection import Connection

from sgl_prefix_attn.offline.engines import EngineArguments
from sgl_prefix_attn.offline.messages import Outcome
from tests.offline import fake_engine


def main(connection: Connection, arguments: EngineArguments) -> None:
    if not fake_engine.plan(connection):
        return
    while (task := connection.recv()) is not None:
        connection.send(Outcome(task.number, fake_engine.answer([1], [(1,)])))
