"""The doctor on models with layers other than full attention, or with a list of backends that SGLang takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.sglang_plugin.doctor import planned_server
from sgl_prefix_attn.sglang_plugin.doctor.model_source import attention_type
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from tests.sglang_plugin.doctor.test_diagnosis import CPU, NAME, SIZES, WRAP, diagnosis
from tests.support.server_facts import server_facts


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


@pytest.mark.parametrize("way", [NAME, ()])
@pytest.mark.parametrize(("family", "architecture"), [("Bert", "BertModel"), ("XLMRoberta", "XLMRobertaModel")])
def test_layers_of_an_encoder_are_refused(family: str, architecture: str, way: tuple[str, ...], tmp_path: Path) -> None:
    config = getattr(transformers, f"{family}Config")(**SIZES | {"head_dim": 16}, architectures=[architecture])
    config.save_pretrained(tmp_path)
    found = diagnosis(tmp_path, "--is-embedding", *way, **WRAP)
    assert not found.packs
    assert found.steps["extend"].reason == reasons.NON_CAUSAL
    assert [answer.reason for _, answer in found.layers] == [reasons.NON_CAUSAL]


def test_prefill_of_an_embedding_model_that_is_causal_runs_packed(tmp_path: Path) -> None:
    transformers.Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    found = diagnosis(tmp_path, "--is-embedding", **WRAP)
    assert found.steps["extend"].reason is None


def test_the_type_of_layers_is_that_of_the_nearest_class_that_builds_them() -> None:
    from sglang.srt.models import bert, llama, whisper

    assert attention_type(bert.BertModel) == attention_type(bert.BertForSequenceClassification) == "ENCODER_ONLY"
    assert attention_type(llama.LlamaForCausalLM) == "DECODER"
    assert attention_type(whisper.WhisperForConditionalGeneration) == "DECODER"  # has layers of both kinds


def test_a_model_that_sglang_runs_with_the_code_of_transformers_has_the_layers_of_a_decoder() -> None:
    facts = server_facts(hf_config=SimpleNamespace(architectures=["NobodysModel"]))
    assert planned_server._attention_type(facts) == "DECODER"
