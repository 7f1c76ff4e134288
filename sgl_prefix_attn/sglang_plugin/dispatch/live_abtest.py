"""An A/B test of routing policies on a running server: arms switch in blocks of decode steps, and steps are timed.

All ranks get the command between the same two steps and count the same decode steps, so they switch together. A test
ends after its last block, or when its client has not asked for `lease_steps` steps of any kind.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_prefix_attn.routing.live_plan import ROWS_OF_AN_ANSWER, LivePlan
from sgl_prefix_attn.routing.policy import Route, Router
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

_RING = 256  # marks in use at most
_COLLECTED_AT_ONCE = 4
RUNNING, FINISHED, EXPIRED, STOPPED = "running", "finished", "expired", "stopped"


class StepClock:
    """Times from the beginning of a step to that of the next forward, without waiting for the device.

    On a GPU by events of the current stream, on a CPU by the host's clock.
    """

    def __init__(self, cuda: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(_RING)] if cuda else []
        self._seconds = np.zeros(_RING)
        self._pending: deque[tuple[int, int]] = deque()  # row, number of its first mark; the next mark ends it
        self._marks = 0
        self._open: int | None = None

    def begin(self, row: int | None) -> None:
        """A forward begins, and ends the step before.

        Args:
            row: of a step to time, None for a forward that is not timed.
        """
        mark = self._marks
        if self._events:
            self._events[mark % _RING].record()
        else:
            self._seconds[mark % _RING] = time.perf_counter()
        if self._open is not None:
            self._pending.append((self._open, mark - 1))
        self._open = row
        self._marks = mark + 1
        while self._pending and self._pending[0][1] <= mark + 1 - _RING:  # its mark is used again
            self._pending.popleft()

    def forget(self) -> None:
        """The server was idle: the open step has no end."""
        self._open = None

    def collect(self, us: npt.NDArray[np.float64], most: int = _COLLECTED_AT_ONCE) -> list[int]:
        """Writes the times of finished steps into their rows, in microseconds. Returns these rows."""
        rows: list[int] = []
        for _ in range(min(most, len(self._pending))):
            row, mark = self._pending[0]
            begin, end = mark % _RING, (mark + 1) % _RING
            if not self._events:
                us[row] = 1e6 * (self._seconds[end] - self._seconds[begin])
            elif self._events[end].query():
                us[row] = 1e3 * self._events[begin].elapsed_time(self._events[end])
            else:
                break
            rows.append(row)
            self._pending.popleft()
        return rows


class Lease:
    """A client's lease. It runs out after `steps` steps of any kind without a renewal; all ranks count the same steps.

    Attributes:
        renewals: so far; the same on all ranks.
    """

    def __init__(self, steps: int) -> None:
        self._steps = self._left = steps
        self._heard = time.monotonic()
        self.renewals = 0

    def renew(self) -> None:
        """The client has asked."""
        self._left = self._steps
        self._heard = time.monotonic()
        self.renewals += 1

    @property
    def silent_seconds(self) -> float:
        """Since the client was heard last, by this rank's clock. No rank may decide by it alone."""
        return time.monotonic() - self._heard

    def runs_out(self) -> bool:
        """A step begins. Returns whether it is one too many."""
        self._left -= 1
        return self._left < 0


class LiveTest:
    """One test on one rank. Rows are of decode steps, in their order; a time is NaN where it is not known.

    Args:
        routers: of the two arms.
        clock: times steps.
        counters: for the times of the arms.

    Attributes:
        lease: of the client.
        token: of the command that started it.
    """

    def __init__(self, plan: LivePlan, routers: tuple[Router, Router], clock: StepClock, counters: Counters) -> None:
        self.plan = plan
        self.routers = routers
        self.status = RUNNING
        self.token = ""
        self._clock = clock
        self._counters = counters
        self._order = plan.order()
        self._next = 0
        self.lease = Lease(plan.lease_steps)
        self.us = np.full(plan.steps, np.nan)
        self.requests = np.zeros(plan.steps, dtype=np.int32)
        self.packed = np.zeros(plan.steps, dtype=np.int8)
        self.would = [{"packed": 0, "stock": 0} for _ in routers]

    @property
    def arm(self) -> int:
        """The arm of the next decode step."""
        return int(self._order[min(self._next, self.plan.steps - 1) // self.plan.block_steps])

    @property
    def steps_done(self) -> int:
        return self._next

    def step(self, is_decode: bool, requests: int) -> int | None:
        """A forward begins. Returns the arm of a decode step, None for others and when the test has ended."""
        finished = is_decode and self._next >= self.plan.steps
        if finished or self.lease.runs_out():
            self._clock.begin(None)
            self.status = FINISHED if finished else EXPIRED
            return None
        if not is_decode:
            self._clock.begin(None)
            self._collect()
            return None
        arm = self.arm
        row = self._next
        self.requests[row] = requests
        self._clock.begin(row)
        self._next = row + 1
        self._collect()
        return arm

    def _collect(self, most: int = _COLLECTED_AT_ONCE) -> None:
        for row in self._clock.collect(self.us, most):
            arm = "AB"[self._order[row // self.plan.block_steps]]
            self._counters.arm_timed(arm, 1e-6 * float(self.us[row]), int(self.requests[row]))

    def took(self, packed: bool) -> None:
        """The route of the step that has begun."""
        self.packed[self._next - 1] = packed

    def decided(self, forest: Any, seq_lens: Any, arm: int, route: Route) -> None:
        """Counts what each arm chooses for a step that was decided anew."""
        self.would[arm][route.value] += 1
        self.would[1 - arm][self.routers[1 - arm].decide(forest, seq_lens).value] += 1

    def idle(self) -> None:
        """The server has no requests."""
        self._clock.forget()

    def stop(self) -> None:
        """Ends a running test."""
        if self.status == RUNNING:
            self.status = STOPPED

    def answer(self, first: int = 0) -> dict[str, Any]:
        """The state, and at most ROWS_OF_AN_ANSWER rows from `first` on, as JSON-able values."""
        self._collect(most=_RING)
        begin = min(max(0, first), self._next)
        rows = slice(begin, min(self._next, begin + ROWS_OF_AN_ANSWER))
        return {
            "status": self.status,
            "plan": self.plan.model_dump(),
            "arm": self.arm,
            "steps_done": self._next,
            "would": self.would,
            "first": rows.start,
            "us": [None if value != value else round(value, 2) for value in self.us[rows].tolist()],
            "requests": self.requests[rows].tolist(),
            "packed": self.packed[rows].tolist(),
        }
