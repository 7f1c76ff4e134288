"""The doctor for a GPU that this machine does not have, on hand-made configurations of the families of models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sglang.srt import platforms
from sglang.srt.utils import common

from sgl_prefix_attn import _native
from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.core import limits
from sgl_prefix_attn.gpus import known_gpu, known_gpus
from sgl_prefix_attn.sglang_plugin.doctor.diagnosis import Diagnosis, diagnose
from sgl_prefix_attn.sglang_plugin.doctor.stand_in import standing_in
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from tests.sglang_plugin.doctor.test_diagnosis import SIZES

SHAPE = {**SIZES, "head_dim": 64, "dtype": "bfloat16"}
_LATENT = {
    "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1}
# name: (class of the configuration, architecture, changes of the configuration, keys of config.json)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", "LlamaForCausalLM", {}, {}),
    "qwen3_next": ("Qwen3Next", "Qwen3NextForCausalLM", {}, {"layer_types": None, "full_attention_interval": 4}),
    "granite": (
        "GraniteMoeHybrid", "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention", "mamba", "attention"], **_MAMBA}, {},
    ),
    "nemotron": ("NemotronH", "NemotronHForCausalLM", {"hybrid_override_pattern": "M-*-"}, {}),
    "gpt_oss": ("GptOss", "GptOssForCausalLM", {}, {}),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3ForCausalLM", _LATENT, {}),
    "deepseek_v32": (
        "DeepseekV3", "DeepseekV32ForCausalLM", _LATENT,
        {"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, (family, architecture, changes, keys) in FAMILIES.items():
        sizes = {key: value for key, value in SHAPE.items() if key != "head_dim" or changes is not _LATENT}
        config = getattr(transformers, f"{family}Config")(**sizes | changes, architectures=[architecture]).to_dict()
        folders[name] = tmp_path_factory.mktemp(name)
        kept = {key: value for key, value in (config | keys).items() if value is not None}
        (folders[name] / "config.json").write_text(json.dumps(kept))
    return folders


def on(gpu: str, model: Path, *arguments: str) -> Diagnosis:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXPACK_")}
    return diagnose(["--model-path", str(model), *arguments], environ | {"PREFIXPACK_WRAP": "1"}, known_gpu(gpu))


@pytest.mark.parametrize(
    ("model", "gpu", "backend", "reason", "packed"),
    [
        ("llama", "h200", "fa3", None, 4),
        ("llama", "b200", "trtllm_mha", None, 4),
        ("llama", "a100", "flashinfer", None, 4),
        ("llama", "rtx4090", "flashinfer", None, 4),
        ("qwen3_next", "h200", "fa3", None, 1),
        ("qwen3_next", "a100", "flashinfer", None, 1),
        ("granite", "h100", "fa3", None, 2),
        ("nemotron", "h200", "fa3", None, 1),
        ("nemotron", "b200", "trtllm_mha", None, 1),
        ("gpt_oss", "h200", "fa3", None, 2),
        ("gpt_oss", "b200", "trtllm_mha", None, 2),
        ("gpt_oss", "l40s", "triton", None, 2),
        ("deepseek_v3", "h200", "fa3", reasons.MLA, 0),
        ("deepseek_v3", "b200", "trtllm_mla", reasons.NOT_WRAPPABLE, 0),
        ("deepseek_v32", "h200", None, reasons.NOT_WRAPPABLE, 0),
    ],
)
def test_a_model_has_the_backend_and_the_answer_of_that_gpu(models, model, gpu, backend, reason, packed):
    found = on(gpu, models[model])
    assert found.device == "cuda"
    assert found.backends == (backend, backend) or backend is None
    assert found.steps["decode"].reason == reason
    layers = [int(text.split()[0]) for text, answer in found.layers if answer.reason is None]
    assert sum(layers) == packed


def test_kernels_are_those_of_a_package_that_is_built_there(models: dict[str, Path]) -> None:
    assert on("h200", models["llama"]).kernels == "native"
    told = on("a100", models["llama"]).kernels
    assert told is not None
    assert told.startswith("triton, because the native kernels' code for compute capability 8.0 has never run")


def test_arguments_that_need_the_gpu_are_resolved_for_it(models: dict[str, Path]) -> None:
    assert on("h200", models["llama"], "--kv-cache-dtype", "fp8_e4m3").steps["decode"].reason is None
    assert on("h200", models["llama"], "--device", "cpu").backends == ("torch_native", "torch_native")


def test_this_machine_is_seen_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> tuple[Any, ...]:
        probes = (common.is_cuda(), common.is_hopper_with_cuda_12_3(), common.is_flashinfer_available())
        return (*probes, common.get_device_sm(), torch.cuda.is_available(), torch.version.cuda, _native.built_with_cuda,
                platforms.current_platform, hasattr(_native, "cuda_code_capability"))  # fmt: skip

    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    before = seen()
    with standing_in(known_gpu("h200")):
        assert seen()[:7] == (True, True, True, 90, True, "13.0", True)
        assert platforms.current_platform.device_name == "cuda"
        assert limits.why_not_native(torch.device("cuda")) is None
    assert seen() == before


def test_the_cpu_engine_of_this_machine_does_not_count(models, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert on("h200", models["llama"]).device == "cuda"
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1"


class TestCommand:
    def test_the_gpu_is_told_as_assumed(self, models, capsys, monkeypatch):
        monkeypatch.setenv("PREFIXPACK_WRAP", "1")
        arguments = ["--model-path", str(models["qwen3_next"])]
        assert main(["doctor", "--gpu", "H200", *arguments]) == 0
        assert ", NVIDIA H200 (compute capability 9.0, assumed)\n" in capsys.readouterr().out
        assert main(["doctor", "--json", "--gpu=h200", *arguments]) == 0
        gpu = json.loads(capsys.readouterr().out)["gpu"]
        assert gpu == {"name": "NVIDIA H200", "capability": [9, 0], "assumed": True}

    def test_an_unknown_gpu_is_named_with_those_that_are_known(self, capsys):
        with pytest.raises(SystemExit) as stop:
            main(["doctor", "--gpu", "h2000", "--model-path", "/nowhere"])
        message = capsys.readouterr().err
        assert stop.value.code == 2
        assert "unknown GPU 'h2000'; did you mean h200?" in message
        assert ", ".join(known_gpus()) in message
