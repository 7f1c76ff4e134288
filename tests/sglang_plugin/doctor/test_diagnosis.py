"""The doctor on model configurations, without weights or a server. `tests/e2e/test_wrap.py` compares with servers."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.dp_attention import compute_dp_attention_world_info
from sglang.srt.layers.radix_attention import RadixAttention

from sgl_prefix_attn.__main__ import main
from sgl_prefix_attn.core.gpu import H200, Gpu
from sgl_prefix_attn.routing import conservative, rule, verify
from sgl_prefix_attn.settings import Settings, load_settings
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.doctor import diagnosis as module
from sgl_prefix_attn.sglang_plugin.doctor import planned_server
from sgl_prefix_attn.sglang_plugin.doctor.advice import HEADS_OF_ALL_RANKS, Change, arguments_without
from sgl_prefix_attn.sglang_plugin.doctor.cli import as_text
from sgl_prefix_attn.sglang_plugin.doctor.diagnosis import Diagnosis, diagnose, kernels_of
from sgl_prefix_attn.sglang_plugin.execution import trtllm_mha
from sgl_prefix_attn.sglang_plugin.execution.pool_support import unsupported_pool
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import NO_SUCH_STEPS, NOT_WRAPPABLE, NOT_WRAPPED
from tests.sglang_plugin.execution.test_kernel_set import gpu
from tests.sglang_plugin.fixture import hides_trees
from tests.sglang_plugin.gpu_fixture import host_kernels
from tests.support.pages import documented
from tests.support.server_facts import server_facts

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "dtype": "float32",
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma2": ("Gemma2", {"sliding_window": 64, "query_pre_attn_scalar": 32}),
    "odd_heads": ("Llama", {"head_dim": 24}),
    "wide_heads": ("Llama", {"head_dim": 512}),
    "heads_of_128": ("Llama", {"head_dim": 128}),
    "qwen3": ("Qwen3", {}),
    "mla": (
        "DeepseekV2",
        {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    ),
}
CPU = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the configuration of a model each, and nothing else."""
    folders = {}
    for name, (family, changes) in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        config = getattr(transformers, f"{family}Config")(**SIZES | changes, architectures=[f"{family}ForCausalLM"])
        config.save_pretrained(folder)
        folders[name] = folder
    return folders


def diagnosis(model: Path, *arguments: str, **variables: str) -> Diagnosis:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXPACK_")}
    return diagnose(["--model-path", str(model), *CPU, *arguments], environ | variables)


def planned(monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: str) -> planned_server.PlannedServer:
    """The server that a diagnosis was made of."""
    made: list[Any] = []
    plan = module.planned_server
    monkeypatch.setattr(module, "planned_server", lambda server_args: made.append(plan(server_args)) or made[0])
    diagnosis(model, *arguments, **WRAP)
    return made[0]


WRAP = {"PREFIXPACK_WRAP": "1"}
NAME = ("--attention-backend", "prefixpack")


def test_a_server_in_wrap_mode_and_one_under_our_name(models: dict[str, Path]) -> None:
    wrapped, named = diagnosis(models["llama"], **WRAP), diagnosis(models["llama"], "--attention-backend", "prefixpack")
    assert (wrapped.way, wrapped.backends) == ("wrap", ("torch_native", "torch_native"))
    assert (named.way, named.backends) == ("name", ("prefixpack", "prefixpack"))
    for found in (wrapped, named):
        reasons_of = {mode: answer.reason for mode, answer in found.steps.items()}
        assert reasons_of == {"decode": None, "extend": None, "mixed": NO_SUCH_STEPS, "verify": NO_SUCH_STEPS}
        assert found.layers == [("4 x full attention, 4/2 heads, head_dim 32", found.layers[0][1])]
        assert found.layers[0][1].reason is None
        assert (found.changes, found.after) == ([], None)


@pytest.mark.parametrize(
    ("arguments", "variables", "reason", "helps"),
    [
        ([], {}, NOT_WRAPPED, True),
        ([], {"PREFIXPACK_WRAP": "fa3"}, NOT_WRAPPED, True),
        (["--attention-backend", "flex_attention"], WRAP, NOT_WRAPPABLE, False),
        (["--disable-radix-cache"], WRAP, reasons.NO_RADIX_CACHE, True),
        (["--enable-two-batch-overlap"], WRAP, reasons.TWO_BATCH_OVERLAP, True),
        ([], {**WRAP, "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "1"}, reasons.UNKNOWN_TREE, True),
        (NAME, {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "rust"}, reasons.UNKNOWN_TREE, True),
        (["--disaggregation-mode", "decode"], WRAP, reasons.NO_RADIX_CACHE, False),
        ([], {**WRAP, "SGLANG_USE_HND_KVCACHE": "1"}, reasons.KV_LAYOUT, True),
        ([], {**WRAP, "PREFIXPACK_PACK_DECODE": "0"}, reasons.DISABLED, True),
        ([], {**WRAP, "PREFIXPACK_ROUTE": "stock"}, reasons.DISABLED, True),
    ],
)
def test_what_refuses_decode_and_what_the_changes_lead_to(models, arguments, variables, reason, helps):
    if reason == reasons.UNKNOWN_TREE and not any(map(hides_trees, variables)):
        pytest.skip("this SGLang shows its tree all the same")
    found = diagnosis(models["llama"], *arguments, **variables)
    assert found.steps["decode"].reason == reason
    assert found.changes[0].reason == reason
    assert (found.after is not None and found.after.steps["decode"].reason is None) == helps


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        (["--disable-radix", "--port", "1"], ["--port", "1"]),
        (["--decode-context-parallel-size", "2", "--tp", "2"], ["--tp", "2"]),
        (["--decode-context=2"], []),
        (["--dcp-size", "2", "--dp", "2", "--disable"], ["--dp", "2", "--disable"]),  # stands for several options
    ],
)
def test_aliases_and_abbreviations_are_left_out(arguments: list[str], left_out: list[str]) -> None:
    for reason in (reasons.NO_RADIX_CACHE, reasons.DECODE_CONTEXT_PARALLEL):
        arguments, _ = Change(reason).followed(arguments, {})
    assert arguments == left_out
    assert Change(HEADS_OF_ALL_RANKS).followed(["--dp", "2", "--tp", "2"], {})[0] == ["--tp", "2"]


@pytest.mark.parametrize("also", [[], ["--disable-radix"]])
def test_what_a_config_file_sets_is_changed_by_hand(models, also, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PREFIXPACK_WRAP", "1")
    config = tmp_path / "c.yaml"
    config.write_text(f"model-path: {models['llama']}\ndevice: cpu\ndtype: float32\ndisable-radix-cache: true\n")
    assert main(["doctor", "--config", str(config), *also]) == 1
    text = capsys.readouterr().out
    assert "  1. Leave out --disable-radix-cache; " in text
    assert "     By hand, for example in the file of --config " in text
    assert "Then packed" not in text
    assert "Launch:" not in text
    assert main(["doctor", "--json", "--config", str(config), *also]) == 1
    found = json.loads(capsys.readouterr().out)
    assert ([change["by_hand"] for change in found["changes"]], found["after_changes"]) == ([True], None)


@pytest.mark.parametrize("arguments", [["--disaggregation-mode", "prefill"], ["--is-embedding"]])
@pytest.mark.parametrize("way", [["--attention-backend", "torch_native"], ["--attention-backend", "prefixpack"]])
def test_a_server_that_only_prefills(models: dict[str, Path], arguments: list[str], way: list[str]) -> None:
    found = diagnosis(models["llama"], *arguments, *way, **WRAP)
    assert {mode for mode, answer in found.steps.items() if answer.reason != NO_SUCH_STEPS} == {"extend"}
    assert found.steps["extend"].reason is None  # on a CPU
    found = diagnosis(models["llama"], *arguments, *way, **WRAP, PREFIXPACK_PACK_EXTEND="0")
    assert found.steps["extend"].reason == reasons.PREFILL_ONLY
    assert found.changes == []


@pytest.mark.parametrize(
    ("model", "reason"), [("mla", reasons.MLA), ("odd_heads", reasons.HEAD_DIM), ("wide_heads", reasons.HEAD_DIM)]
)
@pytest.mark.parametrize("way", ["wrap", "name"])
def test_a_model_that_cannot_be_helped(models: dict[str, Path], model: str, reason: reasons.Reason, way: str) -> None:
    found = diagnosis(models[model], **WRAP) if way == "wrap" else diagnosis(models[model], *NAME)
    assert found.steps["decode"].reason == reason
    assert not found.packs
    assert found.after is None
    assert found.changes[-1].reason.advice.startswith("Nothing")


def test_kinds_of_layers(models: dict[str, Path]) -> None:
    found = diagnosis(models["gemma2"], **WRAP)
    assert [(text, answer.reason) for text, answer in found.layers] == [
        ("2 x sliding window, 4/2 heads, head_dim 32", None),
        ("2 x full attention, 4/2 heads, head_dim 32", None),
    ]


@pytest.mark.parametrize("ranks", [(), ("--dp-size", "2", "--enable-dp-attention")])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_heads_of_a_rank_are_those_that_sglangs_model_has(models, model, ranks, monkeypatch):
    module = importlib.import_module(f"sglang.srt.models.{model}")
    for name in ("QKVParallelLinear", "RowParallelLinear", "RMSNorm", "get_rope", "get_exec", "get_server_args"):
        monkeypatch.setattr(module, name, mock.MagicMock(), raising=False)
    place: tuple[int, ...] = (0, 2, 2 if ranks else 1)
    if "enable_dp_attention" in inspect.signature(compute_dp_attention_world_info).parameters:  # before 0.5.23
        place = (bool(ranks), *place)
    _, attention_ranks, *_ = compute_dp_attention_world_info(*place)
    rank = SimpleNamespace(tp_size=2, tp_rank=0, attn_tp_size=attention_ranks, attn_tp_rank=0)
    monkeypatch.setattr(module, "get_parallel", lambda: rank)
    kind = getattr(module, f"{model.capitalize()}Attention")
    config = {"config": mock.MagicMock()} if model == "llama" else {}
    real = kind(hidden_size=64, num_heads=4, num_kv_heads=2, **config).attn

    found = diagnosis(models[model], "--tp-size", "2", *ranks, **WRAP)
    ((text, answer),) = found.layers
    assert f" {real.tp_q_head_num}/{real.tp_k_head_num} heads" in text
    refused = reasons.KV_LAYOUT if real.tp_k_head_num != 2 // attention_ranks else None
    assert answer.reason == found.steps["decode"].reason == refused
    assert (refused is not None) == (model == "llama" and ranks != ())
    assert refused is None or (found.after is not None and found.after.packs)  # as one group of two ranks


@pytest.mark.parametrize(("page", "reason"), [(64, None), (0, reasons.KV_LAYOUT)])
def test_trtllm_mha_is_judged_as_at_a_start_and_its_packed_steps_are_marked(models, page, reason, monkeypatch):
    server = planned(monkeypatch, models["llama"], "--page-size", "64")
    assert server.page_size == 64
    monkeypatch.setattr(ServerFacts, "backend_names", ("trtllm_mha", "trtllm_mha"))
    monkeypatch.setattr(ServerFacts, "page_size", page)
    decode = module.examine(server, Settings(wrap=True, metrics=False)).steps["decode"]  # type: ignore[arg-type]
    assert (decode.reason, decode.note) == (reason, trtllm_mha.TESTED if reason is None else "")


def test_verify_steps_take_the_place_of_decode_steps(models: dict[str, Path]) -> None:
    speculation = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
    found = diagnosis(models["llama"], *speculation, **WRAP)
    assert (found.steps["decode"].reason, found.steps["verify"].reason) == (NO_SUCH_STEPS, None)
    found = diagnosis(models["llama"], *speculation, **WRAP, PREFIXPACK_PACK_VERIFY="0")
    assert found.changes[0].reason == found.steps["verify"].reason == reasons.DISABLED
    assert found.after is not None
    assert found.after.steps["verify"].reason is None
    found = diagnosis(models["llama"], *speculation, **WRAP, PREFIXPACK_ROUTE="stock")
    assert found.steps["verify"].reason == reasons.DISABLED


@pytest.mark.parametrize(("stock", "packs"), [("fa3", True), ("triton", False)])
def test_verify_steps_on_a_gpu_by_default(
    models: dict[str, Path], stock: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["heads_of_128"]
    server = planned(
        monkeypatch, model, "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(model),
        "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
        "--dtype", "bfloat16",
    )  # fmt: skip
    server = replace(server, device="cuda")
    monkeypatch.setattr(ServerFacts, "backend_names", (stock, stock))
    monkeypatch.setattr(module.eligibility, "choose_kernels", lambda setting, device: host_kernels())
    monkeypatch.setattr(module, "kernels_of", lambda server, settings: "native")
    found = module.examine(server, Settings(wrap=True, metrics=False))  # type: ignore[arg-type]
    assert found.steps["verify"].reason == (None if packs else reasons.SPECULATIVE)
    assert found.steps["verify"].note == (f"if {verify.RULE}" if packs else "")
    assert found.steps["decode"].reason == NO_SUCH_STEPS


@pytest.mark.parametrize(
    ("kernels", "stock", "route", "note"),
    [
        ("native", "fa3", "auto", f"if {verify.RULE}"),
        ("native", "triton", "auto", f"if {conservative.rule('native')}"),
        ("native", "fa3", "reuse>=2", "if reuse>=2"), ("native", "fa3", "packed", ""), ("cpu", "fa3", "reuse>=2", ""),
    ],
)  # fmt: skip
def test_the_rule_of_verify_steps_is_told(kernels: str, stock: str, route: str, note: str) -> None:
    facts = server_facts(model=torch.nn.ModuleList([RadixAttention(32, 128, 1.0, 8, 0)]))
    executor: Any = SimpleNamespace(kernels=kernels, judges_mixed=False, why_stock=lambda mode: None)
    settings = Settings(metrics=False, route=route)
    answer = module._step(executor, settings, "verify", facts, stock)
    assert (answer.reason, answer.note) == (None, note)


@pytest.mark.parametrize(
    ("kernels", "stock", "note"),
    [
        ("native", "fa3", f"if {rule.RULES['fa3', 2]}"), ("triton", "fa3", f"if {conservative.rule('triton')}"),
        ("native", "torch_native", ""), ("cpu", "torch_native", ""),
    ],
)  # fmt: skip
def test_the_rule_of_decode_steps_is_told(kernels: str, stock: str, note: str) -> None:
    facts = server_facts(model=torch.nn.ModuleList([RadixAttention(32, 128, 1.0, 8, 0)]))
    executor: Any = SimpleNamespace(kernels=kernels, judges_mixed=False, why_stock=lambda mode: None)
    assert module._step(executor, Settings(metrics=False), "decode", facts, stock).note == note


def test_pages_that_hold_all_layers() -> None:
    """As SGLang 0.5.15 to 0.5.19 have them without unified memory."""
    pool = planned_server._pool(server_facts(enable_page_major_kv_layout=True), [])
    assert unsupported_pool(pool) == reasons.KV_LAYOUT


def test_the_environment_stays_as_it_is(models: dict[str, Path]) -> None:
    before = dict(os.environ)
    diagnosis(models["llama"], SGLANG_TEST_VARIABLE="1", **WRAP)
    assert dict(os.environ) == before


def test_every_reason_has_an_answer() -> None:
    keys = [reason.key for reason in reasons.REASONS]
    assert len(set(keys)) == len(keys) > 50
    for reason in reasons.REASONS:
        assert reason.text
        assert reason.advice.endswith(".")
        load_settings(dict(reason.variables))  # these are settings, with these values


@given(st.lists(st.sampled_from(["--a", "--b=1", "--b", "--spec-x", "--spec-y=2", "value", "-1"]), max_size=8))
def test_left_out_arguments_go_with_their_values(arguments: list[str]) -> None:
    kept = arguments_without(arguments, ["--b", "--spec-"])
    assert not [argument for argument in kept if argument.startswith(("--b", "--spec-"))]
    assert kept.count("--a") == arguments.count("--a")
    assert arguments_without(arguments, []) == arguments


class TestCommand:
    def test_text_and_status(self, models, capsys, monkeypatch):
        monkeypatch.delenv("PREFIXPACK_WRAP", raising=False)
        line = documented("python -m sgl_prefix_attn doctor --model-path my-llama", {"my-llama": models["llama"]})
        assert main(shlex.split(line)[3:]) == 1
        text = capsys.readouterr().out.replace(str(models["llama"]), "my-llama")
        page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
        (shown,) = re.findall(r"```console\n\$ [^\n]*\n(.*?)```", page, re.DOTALL)
        text = text.replace("4 x full attention, 4/2 heads", "2 x full attention, 8/2 heads")  # as in `tiny-model`
        (hints,) = re.findall(r"KV hints and sessions: .*", shown)
        if versions.has_kv_hints():
            text = text.replace("KV hints and sessions: read", hints)
        assert text.splitlines()[1:] == shown.splitlines()[1:]  # the first line has versions

    def test_json(self, models, capsys, monkeypatch):
        monkeypatch.setenv("PREFIXPACK_WRAP", "1")
        launch = f"--model-path {models['llama']} {' '.join(CPU)}"
        line = documented("python -m sgl_prefix_attn doctor LAUNCH", {"LAUNCH ARGUMENTS": launch}, "--json")
        assert main(shlex.split(line)[3:]) == 0
        short = documented(
            "python -m sgl_prefix_attn doctor --model-path MODEL", {"--model-path MODEL": launch}, "--json"
        )
        assert short == line
        found = json.loads(capsys.readouterr().out)
        assert (found["version"], found["way"], found["packs"]) == (1, "wrap", True)
        assert found["steps"]["prefill"]["packed"]

    def test_variables_of_the_shell_and_of_a_pasted_command(self, models, capsys, monkeypatch):
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
        line = documented("python -m sgl_prefix_attn doctor PREFIXPACK_WRAP=1", {"my-llama": models["llama"]})
        assert main(shlex.split(line)[3:]) == 1
        text = capsys.readouterr().out
        assert "Variables: PREFIXPACK_WRAP=1" in text
        assert "1. Unset SGLANG_USE_HND_KVCACHE, " in text
        after = f"python -m sglang.launch_server --model-path {models['llama']} {' '.join(CPU)}"
        assert f"  Launch: env -u SGLANG_USE_HND_KVCACHE PREFIXPACK_WRAP=1 {after}\n" in text

    @pytest.mark.parametrize(
        ("arguments", "variables", "message"),
        [
            (["bash", "run.sh"], {}, "'bash' is no launch argument of SGLang"),
            ([], {}, "no --model-path among the launch arguments"),
            (["LLAMA", *CPU, "--load-format", "x"], {}, "SGLang does not accept the arguments: argument --load-format"),
            (["LLAMA", "--no-such-option"], {}, "unrecognized arguments: --no-such-option"),
            (["LLAMA", "--chunked-prefil-size", "1"], {}, "--chunked-prefil-size; did you mean --chunked-prefill-size"),
            (["LLAMA", "--jsn"], {}, "--jsn; did you mean --json?"),
            (["--model-path", "/nowhere"], {}, "doctor: no such folder: /nowhere"),
            (["python -m sglang.launch_server --model-path $NO_SUCH > log"], {}, "NO_SUCH is not set here"),
            (
                ["LLAMA", *NAME, *CPU],
                {"PREFIXPACK_ROUTE_PROFILE": "/nowhere"},
                "_ROUTE_PROFILE: there is no such setting",
            ),
            (["LLAMA"], {"PREFIXPACK_WRAP": "fa4"}, "PREFIXPACK_WRAP='fa4' is not usable"),
        ],
    )
    def test_what_cannot_be_used_is_named(self, arguments, variables, message, models, capsys, monkeypatch):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        arguments = [f"--model-path={models['llama']}" if word == "LLAMA" else word for word in arguments]
        assert main(["doctor", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_gpu_whose_native_kernels_never_ran_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (8, 0), code=80, shared_kib=163)
    found_gpu = [Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41e9, 2.039e12)]
    monkeypatch.setattr(module, "gpu_of", lambda device: found_gpu[0])
    server = server_facts(device="cuda")
    because = "the native kernels' code for compute capability 8.0 has never run on a GPU"
    figures = ". The planner's figures: 2.04 TB/s and 1.41 GHz (the driver's), the rest scaled from an H200"
    told = f"triton, because {because}; gpu_kernels=native chooses them{figures}"
    assert kernels_of(server, Settings(metrics=False)) == told
    assert kernels_of(server, Settings(metrics=False, gpu_kernels="native")) == "native, as set" + figures
    found_gpu[0] = H200
    gpu(monkeypatch, (9, 0), code=90, shared_kib=227)
    assert kernels_of(server, Settings(metrics=False)) == "native"
    found = Diagnosis(("fa3", "fa3"), "wrap", {}, [], ["LlamaForCausalLM"], "cuda", told)
    assert f"Kernels: {told}" in as_text(found, [], {})
