"""Counts the tokens of a scheduler's steps, for the report of an offline batch."""

from __future__ import annotations

from typing import Any, Final

from sgl_prefix_attn.offline.queue_order import STEPS_KEY
from sgl_prefix_attn.sglang_plugin.compat.hooks import Hook
from sgl_prefix_attn.sglang_plugin.compat.pinning_targets import RUN_BATCH
from sgl_prefix_attn.sglang_plugin.compat.targets import INTERNAL_STATE
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures

FULL: Final = 0.9  # share of the chunk from which on a step is full


class StepSizes:
    """Steps of one scheduler process: how many, their tokens, and how many were full."""

    def __init__(self, failures: Failures) -> None:
        self._guard = failures.guard("step_sizes", "the report of a batch lacks the step")
        self._steps = self._tokens = self._full = 0

    def hooks(self) -> tuple[Hook, ...]:
        consequence = "the report of a batch does not tell the tokens of a step"
        return (
            Hook(RUN_BATCH, self.after_run_batch, "AFTER", consequence),
            Hook(INTERNAL_STATE, self.after_get_internal_state, "AFTER", consequence),
        )

    def after_run_batch(self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER hook on `Scheduler.run_batch`."""
        with self._guard:
            mode = batch.forward_mode
            if mode.is_idle():  # on a rank that waits for others
                return
            # A check of drafts counts a token for each request.
            prefills = mode.is_extend() and not mode.is_target_verify()
            tokens = batch.extend_num_tokens if prefills else batch.batch_size()
            self._steps += 1
            self._tokens += tokens
            chunk = scheduler.chunked_prefill_size
            self._full += bool(chunk) and tokens >= FULL * chunk

    def after_get_internal_state(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER hook on `Scheduler.get_internal_state`."""
        with self._guard:
            result.internal_state[STEPS_KEY] = {
                "steps": [self._steps, self._tokens, self._full],
                "chunk": scheduler.chunked_prefill_size or 0,
                "mixed": bool(scheduler.is_mixed_chunk),
            }
