"""What the scheduler's steps have: tokens, and which of them are full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_prefix_attn.offline.queue_order import STEPS_KEY
from sgl_prefix_attn.sglang_plugin.scheduling.step_sizes import StepSizes
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures


def told(sizes: StepSizes, scheduler: Any) -> Any:
    result = SimpleNamespace(internal_state={})
    sizes.after_get_internal_state(result, scheduler, None)
    return result.internal_state[STEPS_KEY]


def test_each_step_counts_with_its_tokens():
    failures = Failures()
    sizes, scheduler = StepSizes(failures), SimpleNamespace(chunked_prefill_size=100, is_mixed_chunk=True)
    for mode, new, requests in (
        (ForwardMode.EXTEND, 89, 2),
        (ForwardMode.MIXED, 90, 40),
        (ForwardMode.DECODE, None, 30),
        (ForwardMode.DECODE, None, 95),
        (ForwardMode.TARGET_VERIFY, 7, 3),
        (ForwardMode.IDLE, 0, 0),
    ):
        batch = SimpleNamespace(forward_mode=mode, extend_num_tokens=new, batch_size=lambda count=requests: count)
        sizes.after_run_batch(None, scheduler, batch)
    assert told(sizes, scheduler) == {"steps": [5, 89 + 90 + 30 + 95 + 3, 2], "chunk": 100, "mixed": True}
    without = SimpleNamespace(chunked_prefill_size=None, is_mixed_chunk=False)
    assert told(StepSizes(failures), without) == {"steps": [0, 0, 0], "chunk": 0, "mixed": False}
    assert not failures.counts


def test_a_step_of_another_shape_costs_its_count_and_nothing_else():
    failures = Failures()
    StepSizes(failures).after_run_batch(None, None, SimpleNamespace())
    assert failures.counts == {"step_sizes": 1}
