"""Carries the paths of a step from the scheduler's batch to the attention backend.

Two ways. Hooks: `ForwardBatch.init_new` is where batch and requests are last seen together, and what is attached
there to the ForwardBatch reaches `ModelRunner.forward`, but not the backend, because runners build other batch objects
from it; so `ModelRunner.forward` makes it the current step for as long as it runs. Native seam: an SGLang with
our patch shows the batch to the backend itself (`prepare_schedule_batch`), and no hooks are needed.

Nothing in here may take the server down: what goes wrong is counted, and the step uses the stock backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import BatchTracker, Mode, StepPaths
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters

Kind = Literal["hooks", "patch"]

_ATTRIBUTE = "_prefixpack_handed"


class Handed(NamedTuple):
    """What is handed over for one forward.

    Attributes:
        step: the paths, or the reason why there are none.
        rows: the batch's req_pool_indices, to recognise the batch by.
        seq_lens: the batch's seq_lens_cpu; SGLang makes a new tensor for each step.
    """

    step: StepPaths | str
    rows: Any = None
    seq_lens: Any = None


NOTHING = Handed(fallback_reasons.NO_PATHS)


class Handover:
    """One scheduler process's way from batch to backend."""

    def __init__(self, kind: Kind, tracker: BatchTracker, counters: Counters) -> None:
        self.kind = kind
        self._tracker = tracker
        self._counters = counters
        self._current: Handed | None = None

    def leave_out(self, never_packed: Callable[[Mode], str | None]) -> None:
        """From now on, paths are not read for steps of kinds for which `never_packed` has a reason."""
        self._tracker.never_packed = never_packed

    def read(self, batch: Any) -> Handed:
        """Reads a batch's paths; never raises."""
        start = time.perf_counter()
        try:
            handed = Handed(self._tracker.step(batch), batch.req_pool_indices, batch.seq_lens_cpu)
        except Exception:  # the one guard of the hook bodies: it counts, logs once, and the step is stock
            self._counters.hook_failed()
            handed = Handed(fallback_reasons.HOOK_FAILED)
        self._counters.host_seconds += time.perf_counter() - start
        return handed

    def prepare(self, batch: Any) -> None:
        """Native seam: the batch of the coming forward."""
        self._current = self.read(batch)

    def take(self) -> Handed:
        """What was handed over for the forward that is being prepared; NOTHING if nothing was.

        What the native seam announced holds for one forward only, so that a forward that was not announced (graph
        capture, warm-up) never finds the paths of another one.
        """
        handed = self._current
        if self.kind == "patch":
            self._current = None
        return NOTHING if handed is None else handed

    @contextmanager
    def handed_over(self, handed: Handed | None) -> Iterator[None]:
        """Makes `handed` the current step inside the context."""
        before = self._current
        self._current = handed
        try:
            yield
        finally:
            self._current = before


_active: Handover | None = None


def activate(handover: Handover | None) -> None:
    """Lets the hooks of this process work for `handover`; without one (no prefixpack backend here) they do nothing."""
    global _active
    _active = handover


def after_forward_batch_init(result: Any, cls: type, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on the classmethod `ForwardBatch.init_new`."""
    if _active is not None and not model_runner.is_draft_worker:
        setattr(result, _ATTRIBUTE, _active.read(batch))


def around_model_runner_forward(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on `ModelRunner.forward`."""
    forward_batch = args[0] if args else kwargs.get("forward_batch")
    handed = getattr(forward_batch, _ATTRIBUTE, None)
    if _active is None or handed is None:
        return original(runner, *args, **kwargs)
    with _active.handed_over(handed):
        return original(runner, *args, **kwargs)
