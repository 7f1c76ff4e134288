"""Verify steps of speculative decoding in packed graphs, chains and trees: on the host, and with a GPU's kernels."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_prefix_attn.routing import conservative
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.dispatch.step_planner import STOCK_VARIANT
from sgl_prefix_attn.sglang_plugin.execution import kernel_set
from sgl_prefix_attn.sglang_plugin.execution.drafts import why_no_packed_verify
from sgl_prefix_attn.sglang_plugin.execution.packed_step import STEPS_BETWEEN_PLANS
from sgl_prefix_attn.sglang_plugin.prefix.handover import NOTHING
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from tests.cuda.cases import random_tree
from tests.sglang_plugin.fixture import tree_masks
from tests.sglang_plugin.gpu_fixture import DTYPE, LENGTHS, SHARED, DecodeGraphs, GpuFixture, assert_same, first_of
from tests.support.server_facts import server_facts

on_gpu = pytest.param(
    True,
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    id="gpu",
)
DEVICES = pytest.mark.parametrize("gpu", [pytest.param(False, id="host"), on_gpu])
TREES = pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])


class Verify(GpuFixture):
    """A server that speculates, and its verify step. All requests have the same tree, or chains.

    Args:
        drafts: of each request.
        sizes: graphs to capture; none: eager steps only.
    """

    def __init__(self, drafts: int, *sizes: int, trees: bool = False, gpu: bool = False, **options: Any) -> None:
        kernels = None
        if gpu:
            kernels = kernel_set.choose_kernels("native", torch.device("cuda"))
            if isinstance(kernels, fallback_reasons.Refused):
                pytest.skip(kernels)
        words = random_tree(np.random.default_rng(drafts), drafts)
        back = torch.arange(drafts).view(-1, 1) - torch.arange(drafts)
        chain = back >= 0
        self.trees = trees
        self.mask = chain & ((words.view(-1, 1) >> back.clamp(min=0)) & 1).bool() if trees else chain
        self.words = words.repeat(len(LENGTHS)) if trees else None
        lengths = [length + drafts for length in LENGTHS]
        arguments = SimpleNamespace(
            chunked_prefill_size=64, disable_radix_cache=False, enable_two_batch_overlap=False, enable_pdmux=False,
            speculative_num_draft_tokens=drafts, speculative_eagle_topk=4 if trees else 1,
        )  # fmt: skip
        options = {"settings": Settings(metrics=False, route="packed", pack_verify=True), "room": 256, **options}
        super().__init__(
            SHARED, lengths, [drafts] * len(lengths), kernels=kernels, server_args=arguments,
            spec_algorithm=SpeculativeAlgorithm.EAGLE, **options,
        )  # fmt: skip
        self.check()
        if sizes:
            self.graphs = DecodeGraphs(self, max(sizes))
            for size in sorted(sizes, reverse=True):
                self.graphs.capture(size)

    def check(self) -> None:
        """Makes the present batch a verify step."""
        mask = tree_masks(self.mask, self.seq_lens, of_gpu=True).to(self.tensors)
        self.verify(topk=4 if self.trees else 1, custom_mask=mask)

    def accept(self, counts: list[int]) -> None:
        """The next verify step, when so many drafts of each request were accepted."""
        for row, (length, count) in enumerate(zip(self.seq_lens, counts, strict=True), 1):
            self.rows.req_to_token[row, length : length + count] = torch.arange(1, count + 1, dtype=torch.int32) + row
        self.seq_lens = [length + count for length, count in zip(self.seq_lens, counts, strict=True)]
        self.batch = self._batch()
        self.check()

    def expected(self) -> list[torch.Tensor]:
        """Dense attention over the KV of the last step."""
        outputs = [self.dense(layer, visible=self.words, dtype=torch.float32) for layer in self.layers]
        return [output.to(self.tensors, DTYPE) for output in outputs]

    def assert_mask_ends(self) -> None:
        """The mask of trees is large: nothing of ours keeps it."""
        mask = weakref.ref(self.batch.spec_info.custom_mask)
        self.batch.spec_info.custom_mask = None
        assert mask() is None


@DEVICES
@TREES
@pytest.mark.parametrize("drafts", [2, 3, 4, 8, 16, 33, 64])
def test_a_replay(drafts: int, trees: bool, gpu: bool) -> None:
    fixture = Verify(drafts, 4, trees=trees, gpu=gpu)
    assert_same(fixture.graphs.replay(), fixture.expected())
    assert fixture.fallbacks == {}
    assert fixture.state.counters.steps_packed["verify"] == 1
    # Rows of many drafts fill a tile by themselves, and four requests hardly gain by sharing one.
    assert drafts > 8 or fixture.state.counters.kv_tokens_read < fixture.state.counters.kv_tokens_per_request
    assert fixture.stock.graph_calls == ["state 4"]
    fixture.assert_mask_ends()


@DEVICES
@TREES
@pytest.mark.parametrize("sizes", [(), (2,)])
def test_an_eager_step(sizes: tuple[int, ...], trees: bool, gpu: bool) -> None:
    """Of four requests, without graphs, and with graphs of fewer."""
    fixture = Verify(8, *sizes, trees=trees, gpu=gpu)
    assert_same(fixture.run(), fixture.expected())
    assert fixture.fallbacks == {}
    assert fixture.state.counters.steps_packed["verify"] == 1
    fixture.assert_mask_ends()


@DEVICES
@TREES
def test_padded_requests_stay_finite(trees: bool, gpu: bool) -> None:
    fixture = Verify(4, 7, trees=trees, gpu=gpu)
    assert_same(fixture.graphs.replay(), fixture.expected())
    assert all(output.isfinite().all() for output in fixture.graphs.graph(7)[1])


@DEVICES
@TREES
def test_without_paths_requests_are_read_one_by_one(trees: bool, gpu: bool) -> None:
    fixture = Verify(5, 6, trees=trees, gpu=gpu)
    for handed in (NOTHING, None, NOTHING):
        assert_same(fixture.graphs.replay(handed), fixture.expected())
    assert fixture.fallbacks == {fallback_reasons.NO_PATHS: 2}


@DEVICES
@TREES
@pytest.mark.parametrize("bounds", [False, True], ids=["lengths", "bounds"])
def test_steps_that_accept_different_numbers_of_drafts(bounds: bool, trees: bool, gpu: bool) -> None:
    """bounds: the batch has no lengths in host memory; what is handed over lags behind, plus the drafts of a step."""
    fixture = Verify(4, 4, trees=trees, gpu=gpu)
    rng = np.random.default_rng(0)
    for _ in range(30):
        before = fixture.batch.seq_lens_cpu
        fixture.accept(rng.integers(1, 5, len(LENGTHS)).tolist())
        handed = fixture.handed
        if bounds:
            fixture.batch.seq_lens_cpu = None
            handed = handed._replace(seq_lens=before + 4, bounds=True)
        assert_same(fixture.graphs.replay(handed), fixture.expected())
        fixture.batch.seq_lens_cpu = fixture.handed.seq_lens
    assert fixture.fallbacks == {}
    assert fixture.state.counters.steps_packed["verify"] == 30


@DEVICES
@pytest.mark.parametrize("mask", [True, False], ids=["mask", "empty"])
@TREES
def test_an_idle_rank_replays_padding_only(trees: bool, mask: bool, gpu: bool) -> None:
    """SGLang's verify input of a rank without requests has an empty mask, for which its graph runner puts its own."""
    fixture = Verify(4, 4, trees=trees, gpu=gpu)
    idle = first_of(fixture.batch, 0)
    idle.spec_info = SimpleNamespace(**vars(fixture.batch.spec_info))
    if not mask:
        idle.spec_info.custom_mask = torch.ones(0, dtype=torch.bool, device=fixture.tensors)
    fixture.graphs.replay(NOTHING, idle, size=4)
    assert all(output.isfinite().all() for output in fixture.graphs.graph(4)[1])


def test_reading_one_by_one_always_fits_the_buffers() -> None:
    """Rows of many drafts fill several tiles, each of which has KV slots of its own."""
    fixture = Verify(64, 4, settings=Settings(metrics=False, route="packed", pack_verify=True, max_tile_rows=16))
    context = fixture.rows.req_to_token.shape[1]
    lens, drafts = np.full(4, context, dtype=np.int64), np.full(4, 64, dtype=np.int64)
    plans = fixture.executor.unshared(lens, drafts)
    assert len(plans) == len(fixture.executor.planners) == 1
    for plan in plans:
        fixture.device_step.load(plan, lens, fixture.executor._growth)
    assert fixture.device_step.loads[-len(plans) :] == plans


def test_bounds_beyond_the_longest_context_fit_the_buffers() -> None:
    """SGLang bounds the lengths of DFLASH by the drafts of two steps. A row of its table has room for those of one."""
    fixture = Verify(16, 4, room=20)
    rows = fixture.rows.req_to_token
    rows[1:] = rows[1].clone()
    fixture.seq_lens = [rows.shape[1] - 4] * 4
    fixture.batch = fixture._batch()
    fixture.check()
    bounds = fixture.batch.seq_lens_cpu + 16
    fixture.batch.seq_lens_cpu = bounds
    assert_same(fixture.graphs.replay(NOTHING), fixture.expected())
    assert_same(fixture.graphs.replay(fixture.handed._replace(seq_lens=bounds)), fixture.expected())
    assert fixture.fallbacks == {fallback_reasons.NO_PATHS: 1}


def test_the_conservative_rule_selects_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(metrics=False, pack_verify=True, route="conservative")
    fixture = Verify(4, settings=settings, stock_backend="fa3")
    # torch_native has no verify steps.
    monkeypatch.setattr(fixture.stock, "forward", lambda **call: torch.zeros_like(call["q"]))
    fixture.graphs = DecodeGraphs(fixture, 4)
    fixture.graphs.capture(4)
    assert fixture.backend.graph_variants.sizes == [4]
    fixture.graphs.replay()
    assert fixture.stock.graph_calls[-1] == "replay"
    assert fixture.backend.decision == STOCK_VARIANT
    monkeypatch.setattr(conservative, "LEAST_REQUESTS", 4)
    monkeypatch.setattr(conservative, "LEAST_KV_HEADS", 2)
    fixture.graphs.replay()  # the same batch keeps its route for some steps
    for _ in range(STEPS_BETWEEN_PLANS):
        fixture.accept([1, 2, 3, 4])
        outputs = fixture.graphs.replay()
    assert_same(outputs, fixture.expected())
    assert fixture.state.counters.routed_steps == {"packed": STEPS_BETWEEN_PLANS, "stock": 2}
    assert fixture.fallbacks == {}


@pytest.mark.parametrize("stock_needs_them", [False, True])
def test_packed_verify_steps_ask_for_no_lengths_in_host_memory(stock_needs_them: bool) -> None:
    fixture = Verify(4, 4)
    fixture.stock.needs_cpu_seq_lens = stock_needs_them
    assert fixture.backend._step_planner.packs_some_steps
    assert fixture.backend.needs_cpu_seq_lens is stock_needs_them


@pytest.mark.parametrize(
    ("algorithm", "arguments", "reads_trees", "reason"),
    [
        ("EAGLE", {}, False, None),
        ("EAGLE3", {}, False, None),
        ("STANDALONE", {}, False, None),
        ("DFLASH", {}, False, None),
        ("EAGLE", {"speculative_eagle_topk": 4}, True, None),
        ("EAGLE", {"speculative_eagle_topk": 4}, False, fallback_reasons.SPECULATIVE_TREE),
        ("NGRAM", {}, True, None),
        ("NGRAM", {}, False, fallback_reasons.SPECULATIVE_TREE),
        ("NGRAM", {"speculative_num_draft_tokens": 65}, True, fallback_reasons.SPECULATIVE_TREE),
        ("EAGLE", {"speculative_adaptive": True}, True, fallback_reasons.SPECULATIVE),
        ("EAGLE", {"speculative_num_draft_tokens": 1}, True, fallback_reasons.SPECULATIVE),
        ("EAGLE", {"prefill_attention_backend": "fa3"}, True, fallback_reasons.SPECULATIVE),
        ("DSPARK", {}, True, fallback_reasons.SPECULATIVE),
        ("NONE", {}, False, None),
    ],
)
def test_servers_whose_verify_steps_run_packed(algorithm, arguments, reads_trees, reason):
    defaults = {"speculative_num_draft_tokens": 8, "speculative_eagle_topk": 1, "attention_backend": "prefixpack"}
    facts = server_facts(spec_algorithm=getattr(SpeculativeAlgorithm, algorithm), **defaults | arguments)
    assert why_no_packed_verify(facts, reads_trees) == reason


def test_an_overlapped_plan_stream_keeps_verify_steps_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    facts = server_facts(spec_algorithm=SpeculativeAlgorithm.EAGLE, speculative_num_draft_tokens=4)
    assert why_no_packed_verify(facts, True) == fallback_reasons.SPECULATIVE
