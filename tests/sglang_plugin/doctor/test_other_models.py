"""The doctor on models with layers other than full attention, or with a list of backends that SGLang takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from sgl_prefix_attn.__main__ import main
from tests.sglang_plugin.doctor.test_diagnosis import CPU, NAME, SIZES, WRAP, diagnosis


def test_layers_of_linear_attention_are_left_out(tmp_path: Path) -> None:
    """Qwen3-Next's configuration names an interval, not the types of its layers."""
    config = transformers.Qwen3NextConfig(**SIZES, architectures=["Qwen3NextForCausalLM"]).to_dict()
    config.pop("layer_types")
    (tmp_path / "config.json").write_text(json.dumps({**config, "full_attention_interval": 4}))
    options = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")  # those of a CPU
    found = diagnosis(tmp_path, *options, **WRAP)
    assert [text for text, _ in found.layers] == ["1 x full attention, 4/2 heads, head_dim 32"]


@pytest.mark.parametrize(
    ("way", "told"),
    [(NAME, True), (("--attention-backend=prefixpack",), True), (("--attention-backend", "flex_attention"), False)],
)
def test_a_model_for_which_sglang_takes_certain_backends_only(way, told, tmp_path, capsys):
    transformers.GptOssConfig(**SIZES, architectures=["GptOssForCausalLM"]).save_pretrained(tmp_path)
    assert main(["doctor", "--model-path", str(tmp_path), *CPU, *way]) == 2
    message = capsys.readouterr().err
    assert "GptOssForCausalLM requires one of [" in message
    assert ("and set PREFIXPACK_WRAP=1" in message) == told
