"""Which servers have mixed steps, by the doctor."""

from __future__ import annotations

import pytest

from sgl_prefix_attn.demo.tiny_model import tiny_model
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import NO_SUCH_STEPS, Reason
from tests.sglang_plugin.doctor.test_diagnosis import WRAP, diagnosis


@pytest.mark.parametrize(("chunk", "reason"), [("64", None), ("-1", NO_SUCH_STEPS)])
def test_sglang_mixes_chunks_only(chunk: str, reason: Reason | None) -> None:
    found = diagnosis(tiny_model(), "--enable-mixed-chunk", "--chunked-prefill-size", chunk, **WRAP)
    assert found.steps["mixed"].reason == reason


def test_groups_of_data_parallel_attention_mix_steps_without_the_option() -> None:
    """A rank that prefills makes the step of the other groups a mixed one."""
    found = diagnosis(tiny_model(), "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", **WRAP)
    assert found.steps["mixed"].reason != NO_SUCH_STEPS
    assert diagnosis(tiny_model(), "--tp-size", "2", **WRAP).steps["mixed"].reason == NO_SUCH_STEPS
