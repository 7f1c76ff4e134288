"""Records the decode steps of a running server: features, what ran them, and their times. A ring of bounded length.

All ranks get the command between the same two steps. A recording ends when its client stops it, or when its client has
not asked for `lease_steps` steps of any kind; its rows are then dropped.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np

from sgl_prefix_attn.core.forest import PrefixForest
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.live_plan import RECORDED, ROWS_OF_AN_ANSWER, RecordPlan
from sgl_prefix_attn.sglang_plugin.dispatch.live_abtest import EXPIRED, RUNNING, STOPPED, Lease, StepClock
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed

UNKNOWN = -1  # a feature of a step without paths


class StepRecording:
    """One recording on one rank.

    Args:
        clock: times steps.

    Attributes:
        lease: of the client.
        status: running, stopped or expired.
        token: of the command that started it.
        steps_done: decode steps since its begin; the ring has the last `plan.steps` of them.
    """

    def __init__(self, plan: RecordPlan, clock: StepClock) -> None:
        self.plan = plan
        self.status = RUNNING
        self.token = ""
        self.steps_done = 0
        self._clock = clock
        self.lease = Lease(plan.lease_steps)
        self._features = np.full((plan.steps, len(RECORDED)), UNKNOWN, dtype=np.int64)
        self._us = np.full(plan.steps, np.nan)
        self._ran: list[str] = [""] * plan.steps
        self._forest: PrefixForest | None = None
        self._facts: ForestFacts | None = None

    def step(self, is_decode: bool, handed: Handed, requests: int) -> None:
        """A forward begins.

        Args:
            handed: the paths and lengths of its batch.
            requests: without the padding of graphs.
        """
        if self.lease.runs_out():
            self._end(EXPIRED)
            return
        if not is_decode:
            self._clock.begin(None)
            self._clock.collect(self._us)
            return
        row = self.steps_done % self.plan.steps
        self._us[row] = np.nan
        self._features[row] = UNKNOWN
        self._features[row, 0] = requests
        paths = handed.paths
        if not isinstance(paths, str) and paths.mode == "decode" and handed.seq_lens is not None:
            if self._facts is None or paths.forest is not self._forest:
                self._forest, self._facts = paths.forest, ForestFacts.of(paths.forest)
            lens = handed.seq_lens.numpy()
            if len(lens) == self._facts.requests:
                self._features[row] = astuple(StepFeatures.of(self._facts, lens.astype(np.int64)))
        self._clock.begin(row)
        self.steps_done += 1
        self._clock.collect(self._us)

    def ran(self, kind: str) -> None:
        """What runs the step that has begun: packed, unshared or stock."""
        if self.steps_done and self.status == RUNNING:
            self._ran[(self.steps_done - 1) % self.plan.steps] = kind

    def idle(self) -> None:
        """The server has no requests."""
        self._clock.forget()

    def stop(self) -> None:
        """Ends the recording and drops its rows."""
        if self.status == RUNNING:
            self._end(STOPPED)

    def _end(self, status: str) -> None:
        self.status = status
        self._features, self._us, self._ran = np.empty((0, len(RECORDED)), np.int64), np.empty(0), []
        self._forest = self._facts = None

    def answer(self, first: int = 0) -> dict[str, Any]:
        """The state, and at most ROWS_OF_AN_ANSWER rows from step `first` on that the ring still has."""
        rows: range = range(0)
        if self.status == RUNNING:
            self._clock.collect(self._us, most=self.plan.steps)
            oldest = max(0, self.steps_done - self.plan.steps)
            begin = min(max(first, oldest), self.steps_done)
            rows = range(begin, min(self.steps_done, begin + ROWS_OF_AN_ANSWER))
        places = np.array(rows, dtype=np.int64) % self.plan.steps
        return {
            "status": self.status,
            "plan": self.plan.model_dump(),
            "steps_done": self.steps_done,
            "first": rows.start,
            "columns": list(RECORDED),
            "features": self._features[places].tolist(),
            "us": [None if value != value else round(value, 1) for value in self._us[places].tolist()],
            "ran": [self._ran[place] for place in places.tolist()],
        }
