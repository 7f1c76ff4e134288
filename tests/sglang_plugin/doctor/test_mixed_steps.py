"""Which servers have mixed steps, by the doctor."""

from __future__ import annotations

import pytest

from sgl_prefix_attn.demo.tiny_model import tiny_model
from sgl_prefix_attn.sglang_plugin.doctor.advice import NO_SUCH_STEPS
from tests.sglang_plugin.doctor.test_diagnosis import WRAP, diagnosis


@pytest.mark.parametrize(("chunk", "reason"), [("64", None), ("-1", NO_SUCH_STEPS)])
def test_sglang_mixes_chunks_only(chunk: str, reason: str | None) -> None:
    found = diagnosis(tiny_model(), "--enable-mixed-chunk", "--chunked-prefill-size", chunk, **WRAP)
    assert found.steps["mixed"].reason == reason
