"""Our two hooks around SGLang's own decode graph runner: its capture, keys and replay, with graphs that only note.

What the runner needs of a GPU or of a model is a mock; its methods are the installed SGLang's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.backend import plugin_state
from sgl_prefix_attn.sglang_plugin.dispatch import graph_variants
from sgl_prefix_attn.sglang_plugin.dispatch.step_planner import StepKind
from sgl_prefix_attn.sglang_plugin.prefix import handover
from tests.sglang_plugin.execution.test_verify_graphs import Verify
from tests.sglang_plugin.gpu_fixture import LENGTHS, SHARED, GpuFixture

# What the runner of one version or another looks at.
OFF = (
    "disable_padding", "dllm_uses_input_embeds", "enable_pdmux", "enable_profile_cuda_graph",
    "enable_two_batch_overlap", "is_dllm", "is_encoder_decoder", "ragged_verify_mode", "record_nolora_graph",
    "require_mlp_tp_gather", "_draft_metadata_glue", "_skips_prefilled_inputs", "_target_metadata_glue",
)  # fmt: skip
ABSENT = ("attention_graph_variants", "dllm_input_preparation", "_early_verify_metadata", "_metadata_glue")


class NotedGraphs:
    """A graph backend: `captured` and `replayed` hold keys; a capture runs its forward three times, as real ones do."""

    def __init__(self) -> None:
        self.captured: list[Any] = []
        self.replayed: list[Any] = []

    def capture_one(self, key: Any, forward: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
        for _ in range(3):
            forward()
        self.captured.append(key)

    def replay_session(self) -> Any:
        return mock.MagicMock()

    def replay(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        self.replayed.append(key)
        return module.PPProxyTensors({})


class Runner(module.DecodeCudaGraphRunner):
    """SGLang's runner for batches of 4, without what it makes of a model; whatever is not set here is a mock."""

    def __init__(self, fixture: GpuFixture) -> None:
        size = 4
        self.fixture = fixture
        self.attn_backend = fixture.backend
        self.backend = NotedGraphs()
        self.capture_forward_mode = ForwardMode.DECODE
        self.capture_bs = [size]
        self.captured_req_width = self.num_tokens_per_bs = 1
        self.seq_len_fill_value = 1
        for name in OFF:
            setattr(self, name, False)
        for name in ABSENT:
            setattr(self, name, None)
        self.pp_size = 1
        self.model_runner = mock.MagicMock(lora_manager=None, canary_manager=None, hisparse_coordinator=None)
        self.model_runner.capture_head_hooks = self.model_runner.capture_tail_hooks = []
        self.model_runner.server_args.debug_cuda_graph = False
        self.model_runner.is_draft_worker = False
        static = ("req_pool_indices", "seq_lens", "seq_lens_cpu")
        self.buffers = mock.MagicMock(**{name: getattr(fixture.batch, name) for name in static})
        self.buffers.mamba_track_indices = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.__dict__[name] = mock.MagicMock()
        return value

    def capture_prepare(self, size: int, *args: Any, **kwargs: Any) -> Any:
        self.fixture.batch.dp_padding_mode = mock.MagicMock()
        return self.fixture.batch, self.attn_backend, None

    recapture_if_needed = _validate_capture_hidden_mode = _set_dp_real_num_tokens = mock.MagicMock(return_value=None)
    model_context = mock.MagicMock()
    _process_output_after_replay = mock.MagicMock(side_effect=lambda output, forward_batch: output)
    _take_early_verify_metadata = mock.MagicMock(return_value=False)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    settings = Settings(metrics=False, route="reuse>=2.6")  # requests read 2.7 at first, 2.5 after 16 steps
    fixture = GpuFixture(SHARED, LENGTHS, settings=settings, stock_backend="fa3", room=256)
    fixture.backend.init_cuda_graph_state(4, 4)
    for name, hook in (
        ("capture_one_shape", graph_variants.around_capture_one_shape),
        ("_make_graph_key", graph_variants.around_make_graph_key),
    ):
        around = functools.partialmethod(_hooked, hook, getattr(module.DecodeCudaGraphRunner, name))
        monkeypatch.setattr(module.DecodeCudaGraphRunner, name, around)
    for name in ("get_exec", "set_dp_buffer_len", "set_is_extend_in_batch", "device_timer_ctx"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, mock.MagicMock())
    if hasattr(module, "get_exec"):
        module.get_exec().graph.debug_cuda_graph = False
    if hasattr(module, "maybe_flashinfer_autotune_speculative_draft"):
        monkeypatch.setattr(module, "maybe_flashinfer_autotune_speculative_draft", mock.MagicMock())
    yield Runner(fixture)
    plugin_state.reset()


def _hooked(runner: Runner, hook: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return hook(original, runner, *args, **kwargs)


def capture(runner: Runner) -> None:
    fixture = runner.fixture

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch, **kwargs: Any) -> None:
        for layer in fixture.layers:
            q, _, _ = fixture.qkv(layer)
            fixture.backend.forward(q, None, None, layer, batch, save_kv_cache=False)

    runner.capture_one_shape(4, forward)


def test_each_size_is_captured_for_either_route(runner: Runner) -> None:
    capture(runner)
    assert [(key.size, key.variant_label) for key in runner.backend.captured] == [(4, None), (4, graph_variants.LABEL)]
    assert runner.fixture.backend.graph_variants.sizes == [4]
    assert runner.fixture.stock.layer_calls > 0
    assert runner.fixture.device_step.attended > 0


def test_a_replay_takes_the_graph_that_its_step_was_routed_to(runner: Runner) -> None:
    capture(runner)
    fixture = runner.fixture
    taken = []
    for _ in range(16):
        runner.buffers.seq_lens, runner.buffers.seq_lens_cpu = fixture.batch.seq_lens, fixture.batch.seq_lens_cpu
        with fixture.handover.handed_over(fixture.handed):
            runner.execute(fixture.batch)
        assert runner.backend.replayed[-1] in runner.backend.captured
        taken.append(runner.backend.replayed[-1].variant_label)
        assert (taken[-1] is None) == (fixture.backend.decision.step is not None)
        fixture.grow(8)
    switched = taken.index(graph_variants.LABEL)
    assert taken == [None] * switched + [graph_variants.LABEL] * (16 - switched)
    assert 0 < switched < 16


def test_a_verify_step_is_decided_where_its_graph_is_loaded(runner: Runner) -> None:
    """SGLang loads the batch outside of ModelRunner.forward, and replays without asking for metadata again."""
    fixture = Verify(3)
    fixture.backend.init_cuda_graph_state(4, 12)
    verify = Runner(fixture)
    verify.capture_forward_mode = ForwardMode.TARGET_VERIFY
    verify.captured_req_width = verify.num_tokens_per_bs = 3
    capture(verify)
    assert fixture.stock.layer_calls == 0
    batch = fixture.batch
    setattr(batch, handover._ATTRIBUTE, fixture.handed)
    hooks = handover.HandoverHooks()
    hooks.active = fixture.handover
    hooks.around_forward(module.DecodeCudaGraphRunner.load_batch, verify, batch)
    assert fixture.backend.decision.kind is StepKind.PACKED
    batch.mark_forward_metadata_ready()
    verify.execute(batch)
    assert fixture.backend.decision.kind is StepKind.PACKED
    assert verify.backend.replayed == verify.backend.captured
    assert fixture.state.counters.steps_packed["verify"] == 1
    assert fixture.fallbacks == {}
