"""The factory behind the name `prefixpack`: what it refuses, wraps and hooks."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state
from sgl_prefix_attn.sglang_plugin.backend.stock_only import StockOnly
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import build_stock, stock_name
from sgl_prefix_attn.sglang_plugin.execution.cpu_executor import CpuExecutor, cpu_device
from sgl_prefix_attn.sglang_plugin.prefix.handover import HandoverHooks
from sgl_prefix_attn.sglang_plugin.startup import factory
from sgl_prefix_attn.sglang_plugin.startup.factory import create_backend
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.sglang_plugin.fixture import Fixture, active_state
from tests.sglang_plugin.gpu_fixture import GraphStock, host_kernels
from tests.support.server_facts import server_facts


def gpu_facts(architecture: str = "LlamaForCausalLM", **facts: Any) -> ServerFacts:
    """What of a server on a GPU decides about its stock backend."""
    return server_facts(device="cuda", hf_config=SimpleNamespace(architectures=[architecture]), **facts)


@pytest.fixture
def no_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock backends of a GPU cannot be built here."""
    monkeypatch.setattr(factory, "build_stock", lambda runner, name: SimpleNamespace())


def new_runner(**options: Any) -> Any:
    """A CPU runner without plug-in state."""
    runner = Fixture([[]], [9], **options).runner
    plugin_state.reset()
    return runner


def draft_on_gpu(**options: Any) -> Any:
    """A GPU runner that needs no kernels."""
    runner = new_runner(is_draft_worker=True, **options)
    runner.device = "cuda"
    return runner


@pytest.mark.usefixtures("asked")
class TestFactory:
    def test_an_mla_model_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"'prefixpack' does not support .*\(MLA\)"):
            create_backend(new_runner(use_mla_backend=True), Settings())

    @pytest.mark.parametrize("packs", [True, False])
    def test_a_server_that_only_prefills_gets_no_hooks_unless_prefill_is_packed(self, packs: bool) -> None:
        runner = new_runner()
        runner.model_config.is_generation = False
        backend = create_backend(runner, Settings(metrics=False, pack_extend=packs))
        assert isinstance(backend, StockOnly) is not packs

    @pytest.mark.parametrize("name", ["flashinfer", "fa3", "triton"])
    def test_a_gpu_backend_on_a_cpu_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"stock_backend='{name}' needs a GPU"):
            create_backend(new_runner(), Settings(stock_backend=name))

    def test_a_hook_that_could_not_be_applied_is_named_with_the_version(self, monkeypatch, caplog):
        lost = factory.hook_table.handover_hooks(HandoverHooks())[1].target
        monkeypatch.setattr(factory.hooks, "ensure_applied", lambda wanted: [h for h in wanted if h.target == lost])
        backend = create_backend(new_runner(), Settings(metrics=False))
        assert isinstance(backend, StockOnly), "no step would ever be packed"
        assert "could not hook sglang.srt.model_executor.model_runner.ModelRunner.forward" in caplog.text
        assert f"SGLang {versions.installed_version()}" in caplog.text
        assert "no step runs packed" in caplog.text

    @pytest.mark.usefixtures("no_stock")
    @pytest.mark.parametrize(("route", "hooked"), [("auto", True), ("packed", False), ("stock", False)])
    def test_decode_graphs_are_hooked_where_steps_may_go_either_way(self, route, hooked, asked, monkeypatch):
        monkeypatch.setattr(factory.eligibility, "choose_kernels", lambda setting, device: host_kernels())
        runner = new_runner(head_dim=64, kv_dtype=torch.bfloat16, dtype=torch.bfloat16)
        runner.device = "cuda"
        create_backend(runner, Settings(metrics=False, stock_backend="fa3", route=route))
        assert (set(factory.hook_table.GRAPH_HOOKS) <= set(asked)) == hooked

    @pytest.mark.usefixtures("no_stock")
    @pytest.mark.parametrize(
        ("family", "stock", "hooked"),
        [("Gemma3", "triton", True), ("Gemma3", "fa3", False), ("X", "triton", False)],
    )
    def test_image_masks_are_hooked_where_the_stock_backend_reads_them(self, family, stock, hooked, asked):
        architectures = [f"{family}ForConditionalGeneration"]
        model = SimpleNamespace(is_encoder_decoder=False, hf_config=SimpleNamespace(architectures=architectures))
        runner = draft_on_gpu(draft_attention_backend=None, model_config=model)
        create_backend(runner, Settings(metrics=False, stock_backend=stock))
        assert (set(factory.hook_table.IMAGE_MASK_HOOKS) <= set(asked)) == hooked

    @pytest.mark.parametrize("wanted", [False, "auto"])
    def test_one_token_steps_follow_their_setting(self, wanted):
        create_backend(self.text_runner(), Settings(metrics=False, one_token_steps=wanted))
        assert active_state().handover.runs_one_token_steps is (wanted == "auto")

    @pytest.mark.parametrize("asked_for", ["auto", True])
    def test_one_token_steps_say_where_they_have_no_effect(self, asked_for, caplog):
        caplog.set_level("INFO")
        create_backend(self.text_runner(enable_lora=True), Settings(metrics=False, one_token_steps=asked_for))
        assert not active_state().handover.runs_one_token_steps
        said = "one_token_steps has no effect on this server: enable_lora=True"
        (record,) = [record for record in caplog.records if said in record.message]
        assert record.levelname == ("WARNING" if asked_for is True else "INFO")

    @staticmethod
    def text_runner(**arguments: Any) -> Any:
        model = SimpleNamespace(is_encoder_decoder=False, is_generation=True, model_is_mrope=False)
        return new_runner(model_config=model, server_args=SimpleNamespace(**arguments))

    @pytest.mark.parametrize("in_graphs", [False, True])
    @pytest.mark.parametrize("algorithm", [SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.NONE])
    def test_the_loading_of_graphs_is_hooked_where_drafts_are_checked_in_them(
        self, in_graphs: bool, algorithm: Any, asked: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(CpuExecutor, "runs_in_graphs", in_graphs)
        create_backend(new_runner(spec_algorithm=algorithm), Settings(metrics=False))
        hooked = set(factory.hook_table.verify_hooks(active_state().handover_hooks)) <= set(asked)
        assert hooked == (in_graphs and algorithm is SpeculativeAlgorithm.EAGLE)

    @pytest.mark.parametrize("needs_lens", [False, True])
    def test_a_server_that_is_refused_runs_the_stock_backends_own_methods(self, needs_lens, asked, monkeypatch):
        """Where pack_verify leaves a speculating server out, nothing packs: no hook runs in its steps."""
        stock = GraphStock(new_runner())
        stock.needs_cpu_seq_lens = needs_lens
        monkeypatch.setattr(factory, "build_stock", lambda runner, name: stock)
        monkeypatch.setattr(factory.eligibility, "choose_kernels", lambda setting, device: host_kernels())
        runner = new_runner(spec_algorithm=SpeculativeAlgorithm.EAGLE, dtype=torch.bfloat16, server_args=None)
        runner.device = "cuda"
        monkeypatch.setattr(CpuExecutor, "__init__", Mock(side_effect=AssertionError("an executor of a CPU")))
        backend = create_backend(runner, Settings(metrics=False, stock_backend="fa3", one_token_steps=True))
        state = active_state()
        of_steps = (*factory.hook_table.handover_hooks(state.handover_hooks), *factory.hook_table.GRAPH_HOOKS)
        assert not {hook.target for hook in of_steps} & {hook.target for hook in asked}
        assert isinstance(backend, StockOnly)
        for name in ("forward", "forward_decode", "forward_extend"):
            assert getattr(backend, name) == getattr(stock, name)
        assert backend.needs_cpu_seq_lens is needs_lens
        step = SimpleNamespace()
        backend.init_forward_metadata_out_graph(step, in_capture=True)
        backend.init_forward_metadata_in_graph(step)
        backend.init_forward_metadata_out_graph(step)
        backend.init_forward_metadata(step)
        assert stock.graph_calls == ["capture", "in graph", "replay"]
        assert stock.metadata_calls == 1
        assert dict(state.counters.fallbacks) == {fallback_reasons.SPECULATIVE: 3}

    @pytest.mark.usefixtures("no_stock")
    @pytest.mark.parametrize(("stock", "packs"), [("fa3", True), ("triton", False)])
    def test_chains_of_drafts_run_packed_by_default_over_fa3_alone(self, stock, packs, monkeypatch):
        monkeypatch.setattr(factory.eligibility, "choose_kernels", lambda setting, device: host_kernels())
        arguments = SimpleNamespace(speculative_num_draft_tokens=4, attention_backend="prefixpack")
        runner = new_runner(
            head_dim=128, kv_dtype=torch.bfloat16, dtype=torch.bfloat16, spec_algorithm=SpeculativeAlgorithm.EAGLE,
            server_args=arguments,
        )  # fmt: skip
        runner.device = "cuda"
        backend = create_backend(runner, Settings(metrics=False, stock_backend=stock))
        assert isinstance(backend, StockOnly) != packs

    @pytest.mark.parametrize(
        ("chosen", "stock"),
        [("fa3", "fa3"), ("flashinfer", "flashinfer"), ("triton", "triton"), ("trtllm_mha", "triton"),
         (None, "triton")],
    )  # fmt: skip
    def test_on_cuda_the_stock_backend_is_sglangs_own_choice_where_it_can_be_wrapped(self, chosen, stock, monkeypatch):
        monkeypatch.setattr(ServerFacts, "default_attention_backend", lambda facts: chosen)
        assert stock_name(gpu_facts(), "auto") == stock

    def test_settings_shape_the_planners_device(self) -> None:
        device = cpu_device(Settings(cpu_threads=3, max_tile_rows=16))
        assert device.workers == 3
        assert max(device.tile_rows) == 16
        assert cpu_device(Settings(cpu_threads=3, workers=7)).workers == 7


class TestSuitedStockBackend:
    """Changes that SGLang makes, by name, to the backend it chose or was told, made to the one behind our name."""

    @pytest.fixture(autouse=True)
    def _as_on_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ServerFacts, "default_attention_backend", lambda facts: "fa3")

    @pytest.mark.parametrize("setting", ["auto", "fa3"])
    def test_fa3_cannot_read_e5m2(self, setting: str, caplog: pytest.LogCaptureFixture) -> None:
        assert stock_name(gpu_facts(kv_cache_dtype=torch.float8_e5m2), setting) == "triton"
        assert "stock backend 'triton' instead of 'fa3': it reads no fp8_e5m2 KV cache" in caplog.text

    @pytest.mark.parametrize("setting", ["auto", "fa3", "flashinfer"])
    def test_decode_context_parallelism_is_known_to_triton_alone(self, setting, caplog):
        assert stock_name(gpu_facts(dcp_size=2), setting) == "triton"
        assert "it does not know KV that is spread over ranks (--dcp-size)" in caplog.text

    @pytest.mark.parametrize(
        ("architecture", "setting", "stock"),
        [
            ("Olmo2ForCausalLM", "flashinfer", "triton"),
            ("Olmo2ForCausalLM", "auto", "fa3"),
            ("Lfm2ForCausalLM", "triton", "flashinfer"),
            ("LlamaForCausalLM", "flashinfer", "flashinfer"),
        ],
    )
    def test_what_sglang_refuses_for_a_model(self, architecture: str, setting: str, stock: str) -> None:
        assert stock_name(gpu_facts(architecture), setting) == stock

    def test_torch_native_on_a_gpu_needs_graphs_off(self, caplog: pytest.LogCaptureFixture) -> None:
        assert stock_name(gpu_facts(), "torch_native") == "torch_native"
        assert "needs --disable-cuda-graph" in caplog.text


@pytest.mark.usefixtures("asked", "no_stock")
class TestDraftModel:
    """The steps of a draft model run on a stock backend, which SGLang looks up by its name."""

    def create(self, **options: Any) -> Any:
        runner = draft_on_gpu(**options)
        create_backend(runner, Settings(metrics=False, stock_backend="fa3"))
        return runner

    def test_they_run_on_the_stock_backend_unless_the_user_named_one(self) -> None:
        assert self.create(draft_attention_backend=None).draft_attention_backend == "fa3"
        assert self.create(draft_attention_backend="flashinfer").draft_attention_backend == "flashinfer"

    def test_the_draft_runner_itself_still_gets_ours_which_never_packs(self) -> None:
        """SGLang has resolved that name before it comes to us, and for some algorithms it is all that there is."""
        runner = new_runner(is_draft_worker=True, draft_attention_backend=None)
        backend = create_backend(runner, Settings(metrics=False))
        assert isinstance(backend, StockOnly)
        assert active_state().refusal() == fallback_reasons.DRAFT_WORKER

    def test_what_the_process_tells_about_is_the_target(self) -> None:
        runner = new_runner(draft_attention_backend=None)
        create_backend(runner, Settings(metrics=False))
        runner.is_draft_worker, runner.device = True, "cuda"
        create_backend(runner, Settings(metrics=False, stock_backend="fa3"))
        assert active_state().stock_backend == "torch_native"

    def test_up_to_0_5_15_the_server_arguments_say_so(self) -> None:
        arguments = SimpleNamespace(speculative_draft_attention_backend=None)
        self.create(server_args=arguments)
        assert arguments.speculative_draft_attention_backend == "fa3"

    def test_in_0_5_16_and_17_they_have_to_be_told_who_changes_them(self) -> None:
        class Arguments:
            speculative_draft_attention_backend = None

            def override(self, source: str, **fields: Any) -> None:
                self.changes = (source, fields)

        arguments = Arguments()
        self.create(server_args=arguments)
        assert arguments.changes == ("prefixpack", {"speculative_draft_attention_backend": "fa3"})

    def test_where_that_cannot_be_done_the_option_is_named(self) -> None:
        with pytest.raises(ValueError, match="name one with --speculative-draft-attention-backend, for example 'fa3'"):
            self.create(server_args=SimpleNamespace())


@pytest.mark.parametrize(
    ("requires", "installed", "warns"),
    [
        (["torch==2.9", "flashinfer_python[cu13]==0.6.18"], "0.6.17", True),
        (["flashinfer_python[cu13]==0.6.18"], "0.6.18", False),
        (["flashinfer_python[cu13]==0.6.18"], "0.7.0", False),
        (["flashinfer-python>=0.6; extra == 'other'"], "0.5", False),
        (None, "0.5", False),
        (["flashinfer_python==0.6.18"], "of my own", False),
        (["flashinfer_python==0.6.*"], "0.6.17", False),
        (["flashinfer_python==0.7.*"], "0.6.17", True),
        (["flashinfer_python==0.6.18"], None, False),  # what a broken installation has
    ],
)
def test_an_old_flashinfer_is_named(requires, installed, warns, monkeypatch, caplog):
    """SGLang's own check of the version asks for the name that the server was started with."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer", lambda runner: runner)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    assert build_stock("runner", "flashinfer") == "runner"
    assert ("flashinfer-python is older than SGLang requires" in caplog.text) == warns
