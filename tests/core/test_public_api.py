"""The package's public names, and the example of docs/how-it-works.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sgl_prefix_attn
from tests.support.reference import reference_attention

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"
WITHOUT_SGLANG = """
import sys
sys.modules["sglang"] = None  # an import raises
import sgl_prefix_attn
heavy = {"torch", "numpy", "triton"} & set(sys.modules)
assert not heavy, heavy
"""


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return code


def in_a_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_the_example_computes_attention_with_fewer_reads() -> None:
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(example(), str(PAGE), "exec"), names)
    expected, _ = reference_attention(
        names["q"], *names["kv_cache"], req_to_token=names["req_to_token"], req_pool_indices=torch.arange(3),
        seq_lens=names["seq_lens"], query_lens=[1, 1, 1], scale=0.125,
    )  # fmt: skip
    torch.testing.assert_close(names["out"].double(), expected, rtol=2e-5, atol=2e-5)
    assert names["planner"].kv_tokens.packed < names["planner"].kv_tokens.per_request


def test_importing_is_cheap_and_the_example_needs_no_sglang() -> None:
    assert "KvTokens(packed=" in in_a_fresh_process(WITHOUT_SGLANG + example())


def test_every_public_name_is_there() -> None:
    for name in sgl_prefix_attn.__all__:
        assert getattr(sgl_prefix_attn, name)
        assert name in dir(sgl_prefix_attn)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        sgl_prefix_attn.Nothing  # noqa: B018
