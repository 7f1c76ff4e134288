"""Recorded steps of a server: the client that reads them, and their file."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from sgl_prefix_attn.abtest.client import Client, ServerRefusalError, StepBar
from sgl_prefix_attn.core.files import read_text
from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.routing.features import StepFeatures
from sgl_prefix_attn.routing.live_plan import RECORDED, RecordPlan
from sgl_prefix_attn.routing.profile_store import ServerFacts

FORMAT = "prefixpack recording 1"
POLL_SECONDS = 0.5


class RecordingError(ValueError):
    """Not a recording: the message names the file and what is wrong."""


@dataclass(frozen=True)
class Recording:
    """The decode steps of one data-parallel copy, in their order.

    Attributes:
        facts: what a profile has to fit; None: the layers were not known.
        layers: attention layers that run packed.
        policy: by which the server routed.
        us: float64 [steps], from the begin of a step to that of the next forward; NaN where unknown.
        features: int64 [steps, len(RECORDED)]; -1 where the step had no paths. Requests are always known.
        ran: [steps] packed, unshared or stock.
    """

    facts: ServerFacts | None
    layers: int
    policy: str
    us: npt.NDArray[np.float64]
    features: npt.NDArray[np.int64]
    ran: list[str]

    def step(self, row: int) -> StepFeatures | None:
        """The features of a step, None if it had no paths."""
        values = self.features[row].tolist()
        return None if values[1] < 0 else StepFeatures(*values)


def record(client: Client, plan: RecordPlan, seconds: float) -> list[dict[str, Any]]:
    """Records until the ring is full, the time is over, or Ctrl-C. The copies' newest steps.

    A client that dies leaves nothing on the server after `lease_steps` steps of any kind.
    """
    client.start(plan.model_dump())
    try:
        _wait(client, plan.steps, seconds)
        return _rows(client)
    finally:
        _stop(client)


def _wait(client: Client, steps: int, seconds: float) -> None:
    begin = time.monotonic()
    try:
        with StepBar(steps, "record") as bar:
            while bar.n < steps and time.monotonic() - begin < seconds:
                time.sleep(POLL_SECONDS)
                done = min(copy["steps_done"] for copy in client.read(first=1 << 40))
                bar.reach(min(done, steps))
    except KeyboardInterrupt:  # what there is counts
        return


def _rows(client: Client) -> list[dict[str, Any]]:
    """All rows, of one answer after the other. Steps go on meanwhile: at most the ring's length of each copy."""
    copies = client.read()
    for index, copy in enumerate(copies):
        end = copy["steps_done"]
        while copy["first"] + len(copy["us"]) < end:
            more = client.read(copy["first"] + len(copy["us"]))[index]
            if more["first"] != copy["first"] + len(copy["us"]) or not more["us"]:
                raise ServerRefusalError("the server's ring went on faster than it was read: give more --steps")
            for column in ("features", "us", "ran"):
                copy[column] += more[column]
    return copies


def _stop(client: Client) -> None:
    try:
        client.stop()
    except ServerRefusalError as error:
        tqdm.write(f"the recording was not stopped, it ends by its lease: {error}")


def as_file(copies: list[dict[str, Any]]) -> bytes:
    """The content of a recording's file."""
    kept = ("facts", "layers", "policy", "columns", "features", "us", "ran")
    content = {
        "format": FORMAT,
        "recorded": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "copies": [{name: copy[name] for name in kept} for copy in copies],
    }
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()


def is_recording(path: str | Path) -> bool:
    """Whether a file begins as a recording does. False for a file that cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return FORMAT.encode() in file.read(100)
    except OSError:
        return False


def read_recording(path: str | Path) -> list[Recording]:
    """The recordings of a file, one of each data-parallel copy.

    Raises:
        RecordingError: the file cannot be read or is not a recording.
    """
    try:
        content = json.loads(read_text(path))
        return [_copy(copy) for copy in content["copies"]]
    except OSError as error:
        raise RecordingError(f"{path}: cannot read the recording: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise RecordingError(f"{path}: not a recording of `abtest record`: {error!r}") from error


def _copy(copy: dict[str, Any]) -> Recording:
    if copy["columns"] != list(RECORDED):
        raise ValueError(f"columns {copy['columns']}; this release reads {list(RECORDED)}")
    facts = copy["facts"]
    us = np.array([math.nan if value is None else value for value in copy["us"]], dtype=np.float64)
    features = np.array(copy["features"], dtype=np.int64).reshape(len(us), len(RECORDED))
    if len(copy["ran"]) != len(us):
        raise ValueError(f"{len(copy['ran'])} values of ran for {len(us)} steps")
    return Recording(
        None if facts is None else ServerFacts(**{**facts, "shape": ModelShape(**facts["shape"])}),
        int(copy["layers"]), str(copy["policy"]), us, features, [str(kind) for kind in copy["ran"]],
    )  # fmt: skip
