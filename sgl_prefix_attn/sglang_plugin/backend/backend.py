"""The attention backend `prefixpack`: packed attention where it applies, the stock backend everywhere else.

This file decides; executors run. Each step is decided by itself. A captured decode graph holds packed layers or the
stock backend's for good, so there are two of each size where steps may go either way (`graph_routes`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_prefix_attn.core.step_buffers import PlanTooLarge
from sgl_prefix_attn.routing.policy import Route
from sgl_prefix_attn.sglang_plugin.backend.eligibility import admit, make_executor
from sgl_prefix_attn.sglang_plugin.backend.runtime import Runtime
from sgl_prefix_attn.sglang_plugin.compat.delegation import delegate
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import knows_kv_scales
from sgl_prefix_attn.sglang_plugin.dispatch.graph_variants import GraphRoutes, several_ranks
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRoutes
from sgl_prefix_attn.sglang_plugin.execution.executor import CpuExecutor, Executor, PackedStep
from sgl_prefix_attn.sglang_plugin.execution.layer_registry import KnownLayers
from sgl_prefix_attn.sglang_plugin.execution.layer_support import UNSCALED, kv_scales
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons

logger = logging.getLogger(__name__)


@delegate(AttentionBackend, "stock")
class PrefixPackBackend(AttentionBackend):
    """Runs decode, extend over a cached prefix and mixed steps packed; hands all else to `stock`, counted by reason.

    Args:
        runner: SGLang's ModelRunner.
        stock: the stock backend; every member of the base class that is not defined here is answered by it.
        runtime: what the backends of this process share.
        executor: what runs packed steps; None: the one for the runner's device.
    """

    # The planner reads lengths on the host.
    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, stock: Any, runtime: Runtime, executor: Executor | None = None) -> None:
        self.stock = stock
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._runtime = runtime
        self._counters = runtime.counters
        made = make_executor(runner, runtime.settings) if executor is None else executor
        never = made if isinstance(made, str) else None
        self._executor = CpuExecutor(runner, runtime.settings) if isinstance(made, str) else made
        self.routes = StepRoutes(runtime.settings, runtime.counters, self._executor, runtime.stock_backend, stock)
        self.graph_routes = GraphRoutes(self._graph_has_choice)
        if never is None:
            runtime.routes, runtime.graph_routes = self.routes, self.graph_routes
        self._layers = KnownLayers(
            runner, self._executor, self._counters, never, knows_kv_scales(runtime.stock_backend)
        )
        self._step: PackedStep | None = None
        self._stock_ready = False
        if never != fallback_reasons.DRAFT_WORKER:  # whose steps are not read anyway
            runtime.handover.leave_out(self._never_packs)

    def _never_packs(self, mode: Mode) -> str | None:
        return self._layers.never or self._executor.packs(mode)

    def __getattr__(self, name: str) -> Any:
        if name == "stock":  # not set yet: __init__ has not run
            raise AttributeError(name)
        return getattr(self.stock, name)

    # Metadata -------------------------------------------------------------------------------------------------------

    def prepare_schedule_batch(self, batch: Any) -> None:
        """Called by an SGLang that carries our patch, once per step before the ForwardBatch is built."""
        if self._runtime.handover.kind == "patch":
            self._runtime.handover.prepare(batch)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._begin(forward_batch, in_graph=False)
        # A packed step needs the stock metadata only if one of its layers will run there.
        if self._step is None or self._layers.any_falls_back:
            self._init_stock(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.stock.init_cuda_graph_state(max_bs, max_num_tokens)
        if self._graphs_may_be_packed():
            self._executor.reserve_graphs(max_bs)
            if not self._layers.looked:
                self._layers.look_at_model()
            if (
                self._layers.never == fallback_reasons.NO_MEMORY and several_ranks()
            ):  # others capture two graphs of each size
                raise RuntimeError(f"prefixpack: {fallback_reasons.EXPLANATIONS[fallback_reasons.NO_MEMORY]}")

    def _graphs_may_be_packed(self) -> bool:
        return (
            self._layers.never is None
            and self._executor.runs_in_graphs
            and self._executor.packs("decode") is None
            and not self.routes.always_stock
        )

    def _graph_is_packed(self, mode: Any) -> bool:
        """Whether SGLang's own graphs of this forward mode hold packed layers: the same at capture and at replays."""
        return mode.is_decode() and bool(self._executor.planners) and self._graphs_may_be_packed()

    def _graph_has_choice(self, mode: Any) -> bool:
        """Whether there are to be graphs of the stock backend beside packed ones.

        Not if packed graphs have layers of the stock backend, which keeps metadata of one graph for each size only.
        """
        return self.routes.may_change and self._graph_is_packed(mode) and not self._layers.any_falls_back

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        packed = self._graph_is_packed(forward_batch.forward_mode) and not self.graph_routes.capturing
        if in_capture and packed:
            self._runtime.handover.take()
            self._stock_ready = False
            self._read_alone(forward_batch)
        elif in_capture and self.graph_routes.capturing:
            self._step = None
        else:
            self._begin(forward_batch, in_graph=True)
            alone = packed and self._step is None
            self.graph_routes.replaying = alone and self.graph_routes.has(forward_batch.batch_size)
            if alone and not self.graph_routes.replaying:
                self._read_alone(forward_batch)
        if self._step is None or self._layers.any_falls_back:
            self.stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            self._stock_ready = True

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if not self._all_packed_in_graph():
            self.stock.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        if not self._all_packed_in_graph():
            self.stock.on_after_cuda_graph_warmup()

    def _all_packed_in_graph(self) -> bool:
        """Whether the graph that is captured has nothing of the stock backend, which then has no metadata either."""
        return self._step is not None and self._step.in_graph and not self._layers.any_falls_back

    def shared_read_ends(self, fm: Any) -> Any:
        """Where reads of the scheduler's tables end (SGLang 0.5.18 and later): see `cuda_steps`.

        SGLang asks before the step is decided. Ours end first, so where it may go to the stock backend, that one's
        answer holds for both.
        """
        stock = self.stock.shared_read_ends(fm)
        if self._graph_is_packed(fm) and not self._layers.any_falls_back and not self.graph_routes.sizes:
            return type(stock).PRE_REPLAY
        return stock

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> Any:
        self._step = None
        return self.stock.init_forward_metadata_for_breakable_cuda_graph_capture(forward_batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, capture_metadata: Any, forward_batch: Any, *, static_forward_batch: Any = None
    ) -> None:
        self._step = None
        self.stock.prepare_forward_metadata_for_breakable_cuda_graph_replay(
            capture_metadata, forward_batch, static_forward_batch=static_forward_batch
        )

    def _init_stock(self, forward_batch: Any) -> None:
        if self._step is not None and self._step.in_graph:
            self.stock.init_forward_metadata_out_graph(forward_batch, in_capture=True)
            self.stock.init_forward_metadata_in_graph(forward_batch)
        else:
            self.stock.init_forward_metadata(forward_batch)
        self._stock_ready = True

    def _begin(self, forward_batch: Any, *, in_graph: bool) -> None:
        """Decides how the step runs, and plans it if packed. Every step pays for this: few calls, no copies."""
        start = time.perf_counter()
        # Taken in any case: it must not stay for a later forward.
        handed = self._runtime.handover.take()
        last, self._step, self._stock_ready = self._step, None, False
        if last is not None and handed.step is last.paths and last.continues_with(forward_batch, handed, in_graph):
            self._executor.begin(last)
            self._step = last
            self._runtime.last_packed = handed
            self._counters.packed_on(last.host_lens.shape[0], last.kv_tokens, last.age)
            if self._stock_can_run(forward_batch, in_graph):
                self.routes.stays_packed()
        elif not (self._stock_can_run(forward_batch, in_graph) and self.routes.stays_stock(handed.step)):
            admitted = self._admit(handed.step, forward_batch, in_graph)
            if isinstance(admitted, str):
                reason: str | None = admitted
            else:
                reason = self._plan_step(admitted, handed, forward_batch, in_graph)
            if reason is not None and reason != fallback_reasons.HOOK_FAILED:  # which was counted where it failed
                self._counters.fallback(reason)
        self._counters.host_seconds += time.perf_counter() - start
        if self._runtime.exporter is not None:
            self._runtime.step_done()

    def _admit(self, paths: StepPaths | str, forward_batch: Any, in_graph: bool) -> StepPaths | str:
        """The paths if this kind of step can run packed, else the reason why not."""
        if forward_batch.forward_mode.is_idle():
            return fallback_reasons.IDLE
        if self._layers.never is not None:
            return self._layers.never
        if in_graph and not self._graph_is_packed(forward_batch.forward_mode):
            return fallback_reasons.GRAPH
        admitted = admit(paths, forward_batch, self._executor)
        if not self._layers.looked and not isinstance(admitted, str):
            self._layers.look_at_model()
            return admitted if self._layers.never is None else self._layers.never
        return admitted

    def _plan_step(self, paths: StepPaths, handed: Handed, forward_batch: Any, in_graph: bool) -> str | None:
        """Makes the step packed, unless it is routed to the stock backend; returns a reason if it cannot be."""
        planners = self._executor.planners
        size = forward_batch.batch_size
        if size < paths.num_requests or (size > paths.num_requests and not in_graph):
            return fallback_reasons.ROW_MISMATCH
        host_lens = self._executor.host_lens(forward_batch, handed, paths.num_requests)
        if host_lens is None:
            return fallback_reasons.ROW_MISMATCH
        routed = paths.mode == "decode" and self._stock_can_run(forward_batch, in_graph)
        if routed and self.routes.decide(paths, host_lens) is Route.STOCK:
            return None
        try:
            plans = [planner.plan(paths.forest, host_lens, paths.query_lens) for planner in planners]
        except ValueError:
            self._counters.plan_refused()
            return fallback_reasons.PLAN_REFUSED
        tokens = size if paths.query_lens is None else int(paths.query_lens.sum())
        step = PackedStep.of(forward_batch, paths, tokens, host_lens, plans, in_graph=in_graph)
        step.may_be_padded = self._executor.runs_in_graphs and paths.query_lens is not None
        if planners:
            step.kv_tokens = planners[0].kv_tokens
        try:
            self._executor.begin(step)
        except PlanTooLarge as too_large:
            self._counters.plan_too_large(str(too_large))
            return fallback_reasons.PLAN_TOO_LARGE
        self._step = step
        self._counters.packed(paths.mode, step.kv_tokens)
        self._runtime.planner = planners[0] if planners else None
        self._runtime.last_packed = handed
        return None

    def _stock_can_run(self, forward_batch: Any, in_graph: bool) -> bool:
        """Whether the step can go to the stock backend as a whole."""
        return (
            not in_graph
            or self.graph_routes.has(forward_batch.batch_size)
            or not self._graph_is_packed(forward_batch.forward_mode)
        )

    def _read_alone(self, forward_batch: Any) -> None:
        """Sets up a step of a packed graph without usable paths: right, but every request reads its own KV."""
        lens = forward_batch.seq_lens_cpu
        if lens is None:  # the one case in which a step waits for the device; SGLang promises that it does not occur
            lens = forward_batch.seq_lens.cpu()
        # At least one row, though all may be padding (an idle rank that replays along): a plan of nothing is none.
        count = max(1, forward_batch.batch_size - getattr(forward_batch, "num_padding", 0))
        host_lens = np.maximum(lens[:count].to(torch.int64).numpy(), 1)
        plans = self._executor.unshared(host_lens)
        step = PackedStep.of(forward_batch, None, forward_batch.batch_size, host_lens, plans, in_graph=True)
        self._executor.begin(step)
        self._step = step

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
        step = self._step
        if step is not None and not forward_batch.forward_mode.is_idle():
            facts = self._layers.facts(layer)
            reason = (
                facts.obstacle or _call_obstacle(step, q, layer, kwargs) or self._executor.call_obstacle(facts.slot, q)
            )
            # Asked for each time: weights, and scales with them, may be updated while the server runs.
            scales = kv_scales(layer) if facts.has_scales else UNSCALED
            if scales is None:
                reason = reason or fallback_reasons.KV_SCALES
            elif reason is None:
                if save_kv_cache and k is not None and v is not None:
                    divisors = (layer.k_scale, layer.v_scale) if facts.has_scales else ()
                    self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, *divisors)
                return self._executor.attend(
                    step, facts.slot, q, layer, self.token_to_kv_pool, kwargs.get("sinks"), scales
                )
            self._counters.fallback(reason)
            # What a captured graph has of the stock backend needs its metadata at every replay.
            self._layers.any_falls_back |= step.in_graph
            if not self._stock_ready:
                self._init_stock(forward_batch)
        return stock_forward(
            q=q, k=k, v=v, layer=layer, forward_batch=forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )


def _call_obstacle(step: PackedStep, q: torch.Tensor | None, layer: Any, kwargs: dict[str, Any]) -> str | None:
    """Why this call of a layer cannot run packed, None if it can."""
    if kwargs and any(value is not None and name != "sinks" for name, value in kwargs.items()):
        return fallback_reasons.CALL_ARGUMENTS
    if q is None:
        return fallback_reasons.ROW_MISMATCH
    row = layer.tp_q_head_num * layer.qk_head_dim
    missing = step.num_tokens * row - q.numel()
    if missing and not (step.may_be_padded and missing < 0 and missing % row == 0):
        return fallback_reasons.ROW_MISMATCH
    return None
