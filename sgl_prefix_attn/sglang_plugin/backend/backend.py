"""The attention backend `prefixpack`: adapts SGLang's calls to the step planner, the executor and the stock backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sgl_prefix_attn.sglang_plugin.backend.plugin_state import BackendRecord, PluginState
from sgl_prefix_attn.sglang_plugin.backend.stock_proxy import StockProxy
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import graphs_share_metadata, knows_kv_scales
from sgl_prefix_attn.sglang_plugin.dispatch.graph_variants import several_ranks
from sgl_prefix_attn.sglang_plugin.dispatch.live_policy import LivePolicies
from sgl_prefix_attn.sglang_plugin.dispatch.step_planner import STOCK, StepDecision, StepKind, StepPlanner
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRouter
from sgl_prefix_attn.sglang_plugin.execution import trtllm_mha
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.layer_registry import LayerRegistry
from sgl_prefix_attn.sglang_plugin.execution.layer_support import UNSCALED, kv_scales
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason


class PrefixPackBackend(StockProxy):
    """Runs decode steps, extend steps over a cached prefix and mixed steps packed; all else runs on `stock`, counted.

    `StepPlanner` decides each step. This class keeps the decision until the next step and acts on it.

    Args:
        facts: of the server.
        stock: the stock backend.
        state: the state of the process.
        executor: runs packed steps.
        wraps: the stock backend's name in wrap mode; see `StockProxy`.

    Attributes:
        decision: how the present step runs.
        checks_drafts_in_graphs: whether decode graphs of a server with speculative decoding may hold packed layers.
        graph_variants: decode graphs of the stock backend beside the packed ones.
    """

    def __init__(
        self,
        facts: ServerFacts,
        stock: Any,
        state: PluginState,
        executor: Executor,
        *,
        wraps: str | None = None,
    ) -> None:
        super().__init__(facts, stock, state, wraps=wraps)
        stock_name = wraps or state.stock_backend
        assert state.handover is not None, "PluginState.serve comes first"
        self._handover = state.handover
        self._counters = state.counters
        self._executor = executor
        self._layers = LayerRegistry(facts, executor, self._counters, None, knows_kv_scales(stock_name))
        microbatches = facts.microbatches
        policies = LivePolicies(executor, stock_name)
        router = StepRouter(state.settings, self._counters, self._executor, policies, microbatches=microbatches)
        self._step_planner = StepPlanner(
            self._executor,
            self._layers,
            router,
            self._counters,
            mixes_in_graphs=graphs_share_metadata(stock_name),
            microbatches=microbatches,
        )
        self.graph_variants = self._step_planner.graph_variants
        speculates_in_graphs = self._executor.runs_in_graphs and facts.speculates
        self.checks_drafts_in_graphs = speculates_in_graphs and self._step_planner.why_stock("verify") is None
        # Verify steps are planned by bounds of their lengths.
        self._reads_bounds = self._executor.runs_in_graphs and facts.speculates and versions.keeps_committed_lens()
        # None: fp8 KV is stored by the pool, as nearly all stock backends do.
        self._store_fp8 = trtllm_mha.own_store(stock) if stock_name == trtllm_mha.NAME else None
        self.decision = STOCK
        self._has_stock_metadata = False  # whether the stock backend has metadata of the present step
        self._record = BackendRecord(self._step_planner, router, self._executor, self._layers, wraps)
        state.add(self, self._record)

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether SGLang has to keep lengths in host memory, for which speculation waits for the device in each step.

        The planner reads them, or bounds of them. Where no step ever runs packed, the stock backend's needs are all
        there are.
        """
        reads = self._step_planner.packs_some_steps and not self._reads_bounds
        return reads or bool(getattr(self.stock, "needs_cpu_seq_lens", True))

    def pass_through(self, reason: Reason) -> None:
        """As of any `StockProxy`. Valid if no step will run packed."""
        self.decision = STOCK
        super().pass_through(reason)

    # Metadata -------------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        step = self._decide(forward_batch, in_graph=False).step
        if step is None:
            self.stock.init_forward_metadata(forward_batch)
            self._has_stock_metadata = True
        elif self._layers.has_stock_layers:
            self._init_stock(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        decision = self._decide(forward_batch, in_graph=True, in_capture=in_capture)
        if decision.step is None or self._layers.has_stock_layers:
            self.stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            self._has_stock_metadata = True

    def _decide(self, forward_batch: Any, *, in_graph: bool, in_capture: bool = False) -> StepDecision:
        """Every step pays for this on the scheduler's thread. Loads of attributes of `self` are slow: `__getattr__`."""
        start = time.perf_counter()
        record, state = self._record, self._state
        last, self.decision, self._has_stock_metadata = self.decision, STOCK, False
        try:
            # Taken in any case, so that it does not stay for a later forward.
            handed = self._handover.take(forward_batch)
            if in_capture:
                decision = record.step_planner.decide_capture(handed, forward_batch, last)
            else:
                decision = record.step_planner.decide(handed, forward_batch, last, in_graph)
        except Exception as error:
            decision = record.step_planner.failed(error, forward_batch, in_graph=in_graph, in_capture=in_capture)
        self.decision = decision
        if decision.step is not None and decision.kind is StepKind.PACKED:
            record.last_packed = handed
        state.counters.host_seconds += time.perf_counter() - start
        if state.exporter is not None:
            state.step_done()
        if decision.reason is not None and decision.reason == record.layers.why_all_stock:
            with state.counters.failures.guard("bypass"):
                state.stop_if_nothing_packs()
        return decision

    def _init_stock(self, forward_batch: Any) -> None:
        step = self.decision.step
        if step is not None and step.in_graph:
            self.stock.init_forward_metadata_out_graph(forward_batch, in_capture=True)
            self.stock.init_forward_metadata_in_graph(forward_batch)
        else:
            self.stock.init_forward_metadata(forward_batch)
        self._has_stock_metadata = True

    # Captured graphs --------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.stock.init_cuda_graph_state(max_bs, max_num_tokens)
        if not self._step_planner.graphs_may_be_packed:
            return
        try:
            self._executor.reserve_graphs(max_bs, max_num_tokens)
            if not self._layers.scanned:
                self._layers.scan_model()
        except Exception as error:  # the server runs without us, where no other rank runs with us
            if several_ranks():
                raise
            self._counters.failures.failed("decode_graphs", error, "all steps run on the stock backend")
            self._layers.why_all_stock = fallback_reasons.EXCEPTION
        if several_ranks():  # one that stops alone would replay other graphs than the others
            self._counters.may_stop = False
        # The other ranks capture two graphs of each size, and captures have to stay in step.
        if self._layers.why_all_stock == fallback_reasons.NO_MEMORY and several_ranks():
            raise RuntimeError(f"prefixpack: {fallback_reasons.NO_MEMORY.text}")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if not self._graph_is_all_packed():
            self.stock.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        if not self._graph_is_all_packed():
            self.stock.on_after_cuda_graph_warmup()

    def _graph_is_all_packed(self) -> bool:
        """Whether the present capture has no stock layers. The stock backend then has no metadata for it."""
        step = self.decision.step
        return step is not None and step.in_graph and not self._layers.has_stock_layers

    def shared_read_ends(self, fm: Any) -> Any:
        """When a step stops reading the scheduler's tables (SGLang 0.5.18 and later); see `cuda_executor`.

        SGLang asks before the step is decided. Packed steps stop first, so where a step may go to the stock backend,
        the stock backend's answer is right for both.
        """
        stock = self.stock.shared_read_ends(fm)
        # After a verify step, the draft model reads the tables as well.
        all_packed = fm.is_decode() and self._step_planner.graph_is_packed(fm) and not self._layers.has_stock_layers
        return type(stock).PRE_REPLAY if all_packed and not self.graph_variants.sizes else stock

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> Any:
        self.decision = STOCK
        return self.stock.init_forward_metadata_for_breakable_cuda_graph_capture(forward_batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, capture_metadata: Any, forward_batch: Any, *, static_forward_batch: Any = None
    ) -> None:
        self.decision = STOCK
        self.stock.prepare_forward_metadata_for_breakable_cuda_graph_replay(
            capture_metadata, forward_batch, static_forward_batch=static_forward_batch
        )

    # Layers ---------------------------------------------------------------------------------------------------------

    def forward(
        self,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        layer: Any = None,
        forward_batch: Any = None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        return self._attend(self.stock.forward, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        return self._attend(self.stock.forward_decode, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        return self._attend(self.stock.forward_extend, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(
        self,
        stock_forward: Callable[..., Any],
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> Any:
        step = self.decision.step
        if step is not None and not forward_batch.forward_mode.is_idle():
            stores = False  # whether the layer's KV is being stored: exceptions are SGLang's own
            try:
                facts = self._layers.facts(layer)
                index = facts.shape_index
                reason = (
                    facts.unsupported_reason
                    or step.unsupported_call(q, layer, kwargs)
                    or self._executor.unsupported_call(index, q)
                )
                # Read in each call: weights, and scales with them, may be updated while the server runs.
                scales = kv_scales(layer) if facts.has_scales else UNSCALED
                if scales is None:
                    reason = reason or fallback_reasons.KV_SCALES
                elif reason is None:
                    pool = self.stock.token_to_kv_pool
                    if save_kv_cache and k is not None and v is not None:
                        stores = True
                        if facts.has_scales and self._store_fp8 is not None:
                            self._store_fp8(None, k, v, layer, forward_batch)
                        else:
                            divisors = (layer.k_scale, layer.v_scale) if facts.has_scales else ()
                            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, *divisors)
                        stores = save_kv_cache = False  # a pool with scales divides K and V in place: once only
                    return self._executor.attend(step, index, q, layer, pool, kwargs.get("sinks"), scales)
                if not reason.by_design:
                    self._counters.fallback(reason)
            except Exception as error:
                if stores or (step.in_graph and several_ranks()):  # ranks have to make the same captures
                    raise
                self._counters.step_failed("layer", error, counted=not step.in_graph)
                self._counters.fallback(fallback_reasons.EXCEPTION)
                self._step_planner.forget_steps()
                if not step.in_graph:  # the layers behind this one are the stock backend's
                    self._init_stock(forward_batch)
                    self.decision = STOCK
            # A stock layer in a captured graph needs the stock backend's metadata at every replay.
            self._layers.has_stock_layers |= step.in_graph
            if not self._has_stock_metadata:
                self._init_stock(forward_batch)
        return stock_forward(
            q=q, k=k, v=v, layer=layer, forward_batch=forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )
