"""Wrap mode: which stock backends are wrapped, and what is left of us where one is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import eligibility, plugin_state
from sgl_prefix_attn.sglang_plugin.backend.backend import PrefixPackBackend
from sgl_prefix_attn.sglang_plugin.backend.server_info import process_state
from sgl_prefix_attn.sglang_plugin.backend.stock_only import StockOnly
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import build_stock
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handover, HandoverHooks
from sgl_prefix_attn.sglang_plugin.scheduling.shared_prefill import SharedPrefill
from sgl_prefix_attn.sglang_plugin.startup import entry, factory, hook_table, wrapping
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons as reasons
from tests.sglang_plugin.fixture import LENGTHS, SHARED, Fixture, active_state, hides_trees
from tests.sglang_plugin.gpu_fixture import host_kernels

WRAP = Settings(wrap=True, metrics=False)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _nothing_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "_logged", set())


def new_fixture(**options: Any) -> Fixture:
    """A fixture without plug-in state; its runner has server arguments."""
    options.setdefault("server_args", SimpleNamespace())
    fixture = Fixture(SHARED, LENGTHS, **options)
    plugin_state.reset()
    return fixture


def gpu_runner(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A runner on a GPU whose kernels run in host memory."""
    monkeypatch.setattr(eligibility, "choose_kernels", lambda setting, device: host_kernels())
    options = {"head_dim": 64, "kv_dtype": torch.bfloat16, "dtype": torch.bfloat16, **options}
    runner = new_fixture(**options).runner
    runner.device = "cuda"
    return runner


def on_gpu(monkeypatch: pytest.MonkeyPatch, **options: Any) -> ServerFacts:
    return ServerFacts.of(gpu_runner(monkeypatch, **options))


def gpu_stock(name: str = "fa3") -> Any:
    """An object of a class as SGLang's, which cannot be imported without a GPU."""
    return type(eligibility.STOCK_CLASSES[name], (), {})()


def served() -> Handover | None:
    """What the hooks of this process work for."""
    state = plugin_state.active()
    return None if state is None else state.handover_hooks.active


@pytest.mark.usefixtures("asked")
class TestWrapped:
    def test_the_wrapped_backend_computes_what_stock_does_and_packs(self) -> None:
        fixture = new_fixture()
        fixture.backend = factory.wrap_backend(fixture.runner, "torch_native", fixture.stock, WRAP)
        state = fixture.state = active_state()
        expected = fixture.run_stock()
        for ours, stock in zip(fixture.run(), expected, strict=True):
            torch.testing.assert_close(ours, stock)
        assert state.counters.steps_packed["decode"] == 1
        assert process_state(state)["wrapped"] == ["torch_native"]

    def test_sglang_sees_the_stock_backends_class(self) -> None:
        fixture = new_fixture()
        wrapped = factory.wrap_backend(fixture.runner, "torch_native", fixture.stock, WRAP)
        for kind in (TorchNativeAttnBackend, AttentionBackend, PrefixPackBackend):
            assert isinstance(wrapped, kind)
        assert not isinstance(wrapped, TritonAttnBackend | StockOnly)

    def test_under_our_own_name_it_does_not(self) -> None:
        backend = new_fixture().backend
        assert not isinstance(backend, TorchNativeAttnBackend)
        assert isinstance(backend, PrefixPackBackend)

    @pytest.mark.parametrize("kind", [PrefixPackBackend, StockOnly])
    def test_dflash_finds_that_no_graph_needs_a_mask(self, kind: type) -> None:
        policy = pytest.importorskip("sglang.srt.speculative.dflash_utils").resolve_dflash_verify_mask_policy
        for name in ("TritonAttnBackend", "FlashAttentionBackend", "FlashInferAttnBackend", "TorchNativeAttnBackend"):
            stock = type(name, (), {"full_attn_backend": None})()
            backend = kind.__new__(kind, None, stock)
            backend.stock = stock
            assert policy(backend) == policy(stock) == (name, name == "TorchNativeAttnBackend")
            assert isinstance(backend, kind)

    def test_what_sglang_decides_by_the_name_is_left_alone(self, asked: list[Any]) -> None:
        fixture = new_fixture()
        factory.wrap_backend(fixture.runner, "torch_native", fixture.stock, WRAP)
        expected = (*hook_table.OTHER_HOOKS, *hook_table.handover_hooks(HandoverHooks()))
        # By default those of requests' hints are among them, where requests carry some.
        expected += hook_table.scheduling_hooks(WRAP, active_state())
        assert {hook.target for hook in asked} == {hook.target for hook in expected}

    def test_prefill_and_decode_may_have_wrappers_of_their_own(self) -> None:
        fixture = new_fixture()
        names = {"prefill_attention_backend": "torch_native", "decode_attention_backend": "torch_native"}
        fixture.runner.server_args = SimpleNamespace(**names)
        stocks = fixture.make_stock(), fixture.make_stock()
        prefill, decode = (factory.wrap_backend(fixture.runner, "torch_native", stock, WRAP) for stock in stocks)
        assert (prefill.stock, decode.stock) == stocks
        fixture.backend, state = decode, active_state()
        fixture.state = state
        fixture.run()
        assert state.reported() is decode._record
        assert list(state.backends) == [prefill, decode]

    @pytest.mark.parametrize(("name", "wrapped"), [("fa3", True), ("flashinfer", False)])
    def test_on_a_gpu_a_backend_for_prefill_alone_is_not(self, name, wrapped, monkeypatch):
        names = {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "fa3"}
        facts = on_gpu(monkeypatch, server_args=SimpleNamespace(**names))
        refusal = eligibility.wrap_refusal(facts, name, gpu_stock(name), WRAP)
        assert refusal == (None if wrapped else reasons.COMPUTE_BOUND)


class UnifiedMHATokenToKVPool(MHATokenToKVPool):
    """As SGLang's, of which only the name counts."""


class PagedPool(MHATokenToKVPool):
    """A pool that nobody has looked at."""


def _argument(**values: Any) -> Callable[[Fixture], None]:
    return lambda fixture: vars(fixture.runner.server_args).update(values)


def _runner(**values: Any) -> Callable[[Fixture], None]:
    return lambda fixture: vars(fixture.runner).update(values)


def _architecture(name: str) -> Callable[[Fixture], None]:
    config = SimpleNamespace(architectures=[name])
    return _runner(model_config=SimpleNamespace(is_encoder_decoder=False, hf_config=config))


def _pool(change: Callable[[Any], None]) -> Callable[[Fixture], None]:
    return lambda fixture: change(fixture.pool)


def _layers(**values: Any) -> Callable[[Fixture], None]:
    return lambda fixture: [vars(layer).update(values) for layer in fixture.layers] and None


def _become(kind: type) -> Callable[[Any], None]:
    return lambda pool: setattr(pool, "__class__", kind)


def _hnd(pool: Any) -> None:
    """SGLANG_USE_HND_KVCACHE: [pages, kv heads, page, head dim]."""
    for buffers in (pool.k_buffer, pool.v_buffer):
        buffers[:] = [buffer.unsqueeze(2).contiguous() for buffer in buffers]


REFUSED = {
    "mla": (_runner(use_mla_backend=True), reasons.MLA),
    "draft": (_runner(is_draft_worker=True), reasons.DRAFT_WORKER),
    "encoder-decoder": (_runner(model_config=SimpleNamespace(is_encoder_decoder=True)), reasons.ENCODER_DECODER),
    "unified memory": (_argument(enable_unified_memory=True), reasons.VIRTUAL_SLOTS),
    "virtual slots": (_runner(kv_index_translator=SimpleNamespace(is_translating=True)), reasons.VIRTUAL_SLOTS),
    "unified pool": (_pool(_become(UnifiedMHATokenToKVPool)), reasons.VIRTUAL_SLOTS),
    "deterministic": (_argument(enable_deterministic_inference=True), reasons.DETERMINISTIC),
    "on-policy": (_argument(rl_on_policy_target="fsdp"), reasons.DETERMINISTIC),
    "two-batch overlap": (_argument(enable_two_batch_overlap=True), reasons.TWO_BATCH_OVERLAP),
    "pdmux": (_argument(enable_pdmux=True), reasons.PDMUX),
    "diffusion": (_argument(dllm_algorithm="LowConfidence"), reasons.MODE),
    "nvidia megakernel": (_argument(enable_nvidia_megakernel=True), reasons.WHOLE_MODEL_KERNEL),
    "amd monokernel": (_argument(enable_amd_monokernel=True), reasons.WHOLE_MODEL_KERNEL),
    "decode context": (_argument(dcp_size=2), reasons.DECODE_CONTEXT_PARALLEL),
    "no radix cache": (_argument(disable_radix_cache=True), reasons.NO_RADIX_CACHE),
    "unknown pool": (_pool(_become(PagedPool)), reasons.KV_LAYOUT),
    "hnd": (_pool(_hnd), reasons.KV_LAYOUT),
    "wide heads": (_layers(qk_head_dim=512, v_head_dim=512), reasons.HEAD_DIM),
    "fp4": (_pool(lambda pool: setattr(pool, "k_scale_buffer", [])), reasons.KV_DTYPE),
    "bidirectional": (_layers(attn_type=AttentionType.ENCODER_ONLY), reasons.NON_CAUSAL),
    "reads metadata": (_architecture("InklingForConditionalGeneration"), reasons.READS_METADATA),
}


def _shared_prefill() -> SharedPrefill:
    state = plugin_state.active()
    assert state is not None
    return state.own(SharedPrefill, state.counters)


class TestRefused:
    """SGLang's own object comes back, so a refused server does what it does without us."""

    @pytest.mark.parametrize("case", REFUSED)
    def test_nothing_of_ours_is_left(self, case: str, asked: list[Any], caplog: pytest.LogCaptureFixture) -> None:
        change, reason = REFUSED[case]
        fixture = new_fixture()
        assert eligibility.wrap_refusal(fixture.facts, "torch_native", fixture.stock, WRAP) is None
        change(fixture)
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                assert factory.wrap_backend(fixture.runner, "torch_native", fixture.stock, WRAP) is fixture.stock
        assert plugin_state.active() is None
        assert not asked
        assert caplog.text.count(reason.text) == 1

    def test_fp8_scales_that_the_host_does_not_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = on_gpu(monkeypatch, kv_dtype=torch.float8_e4m3fn)
        assert eligibility.wrap_refusal(facts, "fa3", gpu_stock(), WRAP) is None
        for layer in facts.model:
            layer.k_scale, layer.k_scale_float = torch.ones(2), None
        assert eligibility.wrap_refusal(facts, "fa3", gpu_stock(), WRAP) == reasons.KV_SCALES

    def test_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        facts, stock = on_gpu(monkeypatch, spec_algorithm=SpeculativeAlgorithm.EAGLE), gpu_stock()
        assert eligibility.wrap_refusal(facts, "fa3", stock, WRAP) == reasons.SPECULATIVE
        never = Settings(wrap=True, route="stock")  # type: ignore[arg-type]
        assert eligibility.wrap_refusal(on_gpu(monkeypatch), "fa3", stock, never) == reasons.DISABLED
        monkeypatch.setattr(
            eligibility, "choose_kernels", lambda setting, device: reasons.Refused(reasons.NO_CUDA_KERNEL, "none")
        )
        assert eligibility.wrap_refusal(facts, "fa3", stock, WRAP) == reasons.NO_CUDA_KERNEL

    @pytest.mark.usefixtures("asked")
    @pytest.mark.parametrize(("name", "reason"), [("fa3", None), ("triton", reasons.SPECULATIVE)])
    def test_chains_of_drafts_keep_a_wrapper_over_fa3_alone(
        self, name: str, reason: reasons.Reason | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arguments = SimpleNamespace(speculative_num_draft_tokens=4, attention_backend=name)
        options = {"spec_algorithm": SpeculativeAlgorithm.EAGLE, "head_dim": 128, "server_args": arguments}
        runner = gpu_runner(monkeypatch, **options)
        assert eligibility.wrap_refusal(ServerFacts.of(runner), name, gpu_stock(name), WRAP) == reason
        if reason is None:
            backend = factory.wrap_backend(runner, name, gpu_stock(name), WRAP)
            assert isinstance(backend, PrefixPackBackend)
            assert backend.checks_drafts_in_graphs

    @pytest.mark.parametrize(
        ("variable", "value"), [(versions.CPP_TREE_VARIABLE, "1"), (versions.TREE_CORE_VARIABLE, "rust")]
    )
    def test_a_tree_without_nodes(self, variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = on_gpu(monkeypatch)
        monkeypatch.setenv(variable, value)
        if not hides_trees(variable):
            assert not facts.hides_its_tree
            pytest.skip("this SGLang shows its tree all the same")
        assert eligibility.wrap_refusal(facts, "fa3", gpu_stock(), WRAP) == reasons.UNKNOWN_TREE
        assert eligibility.choose_executor(facts, WRAP, "torch_native") == reasons.UNKNOWN_TREE
        facts = on_gpu(monkeypatch, server_args=SimpleNamespace(radix_cache_backend="of the user"))  # not the C++ tree
        assert facts.hides_its_tree is (variable != versions.CPP_TREE_VARIABLE)

    @pytest.mark.parametrize("change", [{"is_generation": False}, {"disaggregation_mode": "prefill"}])
    def test_a_server_that_never_decodes(self, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = SimpleNamespace(chunked_prefill_size=64, **change)
        facts = on_gpu(monkeypatch, model_config=SimpleNamespace(**change), server_args=arguments)
        assert eligibility.wrap_refusal(facts, "fa3", gpu_stock(), WRAP) == reasons.PREFILL_ONLY
        assert eligibility.executor_at_start(facts, WRAP, "fa3") == reasons.PREFILL_ONLY
        packs = Settings(wrap=True, pack_extend=True)  # type: ignore[arg-type]
        assert eligibility.wrap_refusal(facts, "fa3", gpu_stock(), packs) is None

    @pytest.mark.parametrize(("asked", "chunk", "mixes"), [(False, 64, False), (True, 64, True), (True, -1, False)])
    def test_steps_that_the_server_does_not_have_keep_no_wrapper(self, asked: bool, chunk: int, mixes: bool) -> None:
        """`pack_mixed` is on by default on a CPU; without mixed steps it packs nothing."""
        fixture = new_fixture(server_args=SimpleNamespace(enable_mixed_chunk=asked, chunked_prefill_size=chunk))
        settings = Settings(wrap=True, route="stock", pack_extend=False)  # type: ignore[arg-type]
        refusal = eligibility.wrap_refusal(fixture.facts, "torch_native", fixture.stock, settings)
        assert refusal == (None if mixes else reasons.DISABLED)

    @pytest.mark.parametrize("bases", [(), (TorchNativeAttnBackend,)])
    def test_an_object_of_another_class_behind_the_name(self, bases: tuple[type, ...]) -> None:
        fixture = new_fixture()
        kind: Any = type("OfAnotherPlugIn", bases, {"forward_decode": None})
        other = kind.__new__(kind)
        assert factory.wrap_backend(fixture.runner, "torch_native", other, WRAP) is other

    def test_a_graph_switch_of_sglang_stays_as_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        changed: list[Any] = []
        monkeypatch.setattr(versions, "keep_metadata_out_of_graphs", lambda environ: changed.append(1) or True)
        facts = on_gpu(monkeypatch, head_dim=32)  # no kernel has it
        assert eligibility.wrap_refusal(facts, "fa3", gpu_stock(), WRAP) == reasons.HEAD_DIM
        assert not changed

    @pytest.mark.parametrize("place", ["wrap_refusal", "connect", "PrefixPackBackend"])
    def test_an_error_of_ours_costs_nothing_but_a_line(self, place, asked, monkeypatch, caplog):
        fixture = new_fixture()
        fails = Mock(side_effect=RuntimeError("a fault of ours"))
        monkeypatch.setattr(eligibility if place == "wrap_refusal" else factory, place, fails)
        for _ in range(2):
            assert factory.wrap_backend(fixture.runner, "torch_native", fixture.stock, WRAP) is fixture.stock
        assert served() is None
        assert caplog.text.count("Traceback") == caplog.text.count("RuntimeError: a fault of ours") == 1

    def test_a_hook_that_cannot_be_applied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(factory.hooks, "ensure_applied", lambda wanted: [wanted[len(hook_table.OTHER_HOOKS)]])
        fixture = new_fixture()
        assert factory.wrap_backend(fixture.runner, "torch_native", fixture.stock, WRAP) is fixture.stock
        assert served() is None
        prefills = _shared_prefill()
        assert not prefills.active
        assert prefills.holds_back(None, None) is None
        monkeypatch.setattr(factory.hooks, "ensure_applied", lambda wanted: [])
        factory.wrap_backend(fixture.runner, "torch_native", fixture.make_stock(), WRAP)
        assert prefills.active

    def test_one_that_runs_wrapped_stays_when_another_is_refused(self, asked: list[Any]) -> None:
        fixture = new_fixture()
        wrapped = factory.wrap_backend(fixture.runner, "torch_native", fixture.stock, WRAP)
        fixture.runner.is_draft_worker = True
        factory.wrap_backend(fixture.runner, "torch_native", fixture.make_stock(), WRAP)
        assert served() is not None
        assert _shared_prefill().active
        assert isinstance(wrapped, PrefixPackBackend)


class TestRegistry:
    @pytest.fixture(autouse=True)
    def _registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, stock in list(ATTENTION_BACKENDS.items()):
            monkeypatch.setitem(ATTENTION_BACKENDS, name, stock)

    def test_the_named_ones_are_replaced_once(self) -> None:
        before = dict(ATTENTION_BACKENDS)
        settings = Settings(wrap=("torch_native", "triton"))
        wrapping.install(settings)
        changed = dict(ATTENTION_BACKENDS)
        assert {name for name in before if changed[name] is not before[name]} == {"torch_native", "triton"}
        wrapping.install(settings)
        assert dict(ATTENTION_BACKENDS) == changed

    def test_a_stock_backend_of_ours_is_never_wrapped(self, asked: list[Any]) -> None:
        fixture = new_fixture()
        wrapping.install(WRAP)
        wrapped = ATTENTION_BACKENDS["torch_native"](fixture.runner)
        assert isinstance(wrapped, PrefixPackBackend)
        assert not isinstance(wrapped, StockOnly)
        assert type(build_stock(fixture.runner, "torch_native")) is TorchNativeAttnBackend

    def test_sglangs_own_errors_arrive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(runner: Any) -> Any:
            raise ValueError("SGLang cannot run here")

        monkeypatch.setitem(ATTENTION_BACKENDS, "fa3", fail)
        wrapping.install(WRAP)
        with pytest.raises(ValueError, match="SGLang cannot run here"):
            ATTENTION_BACKENDS["fa3"](new_fixture().runner)

    @pytest.mark.parametrize("wrap", [False, True])
    def test_the_name_on_a_cpu_needs_hooks_before_a_backend_and_wrap_mode_none(
        self, wrap: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        registered: list[Any] = []
        monkeypatch.setattr(wrapping.hooks, "register", registered.extend)
        monkeypatch.setattr(entry, "in_scheduler_process", lambda: True)
        monkeypatch.setattr(entry, "load_settings", lambda: Settings(wrap=wrap, retention="off"))  # type: ignore[arg-type]
        monkeypatch.delitem(entry.sys.modules, "sglang.srt.entrypoints.engine", raising=False)
        entry.register()
        assert bool(registered) != wrap
