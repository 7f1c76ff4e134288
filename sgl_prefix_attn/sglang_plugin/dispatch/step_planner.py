"""The decision how a step runs: packed, without sharing, or on the stock backend. Everything that is a fallback.

The backend asks once for each step. The answer depends on the batch, its paths and the last decision only, so all
tensor-parallel ranks decide alike.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

import numpy as np

from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import Plan, PlanError
from sgl_prefix_attn.core.step_buffers import PlanTooLarge
from sgl_prefix_attn.routing import mixed
from sgl_prefix_attn.routing.features import ForestFacts, StepFeatures
from sgl_prefix_attn.routing.policy import Route
from sgl_prefix_attn.sglang_plugin.dispatch.graph_variants import GraphVariants
from sgl_prefix_attn.sglang_plugin.dispatch.microbatches import LastSteps
from sgl_prefix_attn.sglang_plugin.dispatch.step_router import StepRouter
from sgl_prefix_attn.sglang_plugin.execution.drafts import lens_after, unsupported_verify
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.layer_registry import LayerRegistry
from sgl_prefix_attn.sglang_plugin.execution.packed_step import PackedStep
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import DECODE_MODES, MODES, Mode, StepPaths
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.failures import OF_ONE_RANK, several_ranks
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason


class StepKind(enum.Enum):
    """How a step runs."""

    PACKED = "packed"  # shared prefixes are read once
    UNSHARED = "unshared"  # on the packed kernels, every request reads its own KV; only in captured graphs
    STOCK = "stock"  # on the stock backend


class StepDecision(NamedTuple):
    """How a step runs.

    Attributes:
        reason: why the step is not packed; None for packed steps, steps routed to the stock backend, and captures.
        step: the plans, ready for the layers; None on the stock backend.
        is_graph_variant: whether the step runs in the stock backend's variant of a packed graph.
    """

    kind: StepKind
    reason: Reason | None = None
    step: PackedStep | None = None
    is_graph_variant: bool = False


class RoutedPackedError(Exception):
    """An exception of ours, its cause, in a step that was to run packed: all ranks had decided that by then."""


STOCK = StepDecision(StepKind.STOCK)
STOCK_VARIANT = StepDecision(StepKind.STOCK, is_graph_variant=True)


@functools.cache  # bounded by the fixed set of reasons
def _stock(reason: Reason | None, is_graph_variant: bool) -> StepDecision:
    return StepDecision(StepKind.STOCK, reason, is_graph_variant=is_graph_variant)


def _requests(handed: Handed, forward_batch: Any) -> int:
    """Requests of a step, without the padding of graphs where paths are known."""
    return int(forward_batch.batch_size) if isinstance(handed.paths, Reason) else handed.paths.num_requests


def _mode_of(forward_mode: Any) -> Mode:
    """The kind of the steps of a decode graph runner."""
    return "verify" if forward_mode.is_target_verify() else "decode"


class StepPlanner:
    """Decides the steps of one backend and plans those that run packed.

    Args:
        executor: runs packed steps.
        layers: the model's attention layers.
        router: routes decode and verify steps that could run packed.
        counters: process totals.
        mixes_in_graphs: whether a size may have two graphs where some layers of the packed one are stock.
        microbatches: batches that take turns.

    Attributes:
        graph_variants: decode graphs of the stock backend beside the packed ones.
    """

    def __init__(
        self,
        executor: Executor,
        layers: LayerRegistry,
        router: StepRouter,
        counters: Counters,
        *,
        mixes_in_graphs: bool,
        microbatches: int,
    ) -> None:
        self._mixes_in_graphs = mixes_in_graphs
        self._executor = executor
        self._layers = layers
        self._router = router
        self._counters = counters
        # Packed decode steps. None: the one that a step may continue is the step before.
        self._packed_steps = LastSteps[StepDecision](microbatches) if microbatches > 1 else None
        self.graph_variants = GraphVariants(self._wants_variants, counters.failures)

    # Facts about the server -----------------------------------------------------------------------------------------

    @property
    def why_all_stock(self) -> Reason | None:
        """The reason why no step of this runner runs packed any more, None if some may."""
        return fallback_reasons.STOPPED if self._counters.stopped else self._layers.why_all_stock

    def why_stock(self, mode: Mode) -> Reason | None:
        """The reason why no step of a kind ever runs packed, None if some may. No paths are read for such steps."""
        return self.why_all_stock or self._executor.why_stock(mode)

    @property
    def packs_some_steps(self) -> bool:
        """Whether any step may run packed."""
        return self._layers.why_all_stock is None and any(
            self._executor.why_stock(mode) is None and not (mode in DECODE_MODES and self._router.always_stock)
            for mode in MODES
        )

    @property
    def graphs_may_be_packed(self) -> bool:
        """Whether decode graphs may hold packed layers."""
        return (
            self._layers.why_all_stock is None
            and self._executor.runs_in_graphs
            and any(self._executor.why_stock(mode) is None for mode in DECODE_MODES)
            and not self._router.always_stock
        )

    def graph_is_packed(self, forward_mode: Any) -> bool:
        """Whether SGLang's graphs of a forward mode hold packed layers: the same at capture and at replays."""
        return (
            (forward_mode.is_decode() or forward_mode.is_target_verify())
            and bool(self._executor.planners)
            and self.graphs_may_be_packed
            and self._executor.why_stock(_mode_of(forward_mode)) is None
        )

    def _wants_variants(self, forward_mode: Any) -> bool:
        # Packed graphs with stock layers have variants only where the stock backend can serve two graphs of a size.
        return (
            self._router.may_change(_mode_of(forward_mode))
            and self.graph_is_packed(forward_mode)
            and (self._mixes_in_graphs or not self._layers.has_stock_layers)
        )

    # Each step --------------------------------------------------------------------------------------------------------

    def decide(self, handed: Handed, forward_batch: Any, last: StepDecision, in_graph: bool) -> StepDecision:
        """Decides a step. A packed step is ready for its layers afterwards. Fallbacks are counted.

        Args:
            handed: the paths of the batch, or why there are none.
            forward_batch: SGLang's ForwardBatch; padded in a graph.
            last: the decision of the step before. A steady step returns it unchanged, or that of its microbatch.
            in_graph: whether a captured graph runs the layers.
        """
        in_packed_graph = in_graph and self.graph_is_packed(forward_batch.forward_mode)
        may_route = not in_packed_graph or self.graph_variants.has(forward_batch.batch_size)
        changed = self._router.watches_steps and self._router.step_begins(
            forward_batch.forward_mode.is_decode(), _requests(handed, forward_batch)
        )
        if self._packed_steps is not None:
            if changed:  # of all microbatches
                self._packed_steps.clear()
            last = self._packed_steps.get(handed.paths) or last
        step = last.step
        steady = step is not None and not changed and handed.paths is step.paths
        if step is not None and steady and step.continues_with(forward_batch, handed, in_graph):
            try:
                self._executor.begin(step)
                if may_route:
                    self._router.stays_packed()
                self._counters.packed_on(step.host_lens.shape[0], step.kv_tokens, step.age)
            except Exception as error:
                raise RoutedPackedError from error
            return last
        paths = handed.paths
        outcome: PackedStep | Route | Reason
        if isinstance(paths, Reason):
            outcome = self._unsupported(paths, forward_batch, in_graph and not in_packed_graph) or paths
        elif may_route and self._router.stays_stock(paths):
            return STOCK_VARIANT if in_packed_graph else STOCK
        else:
            outcome = self._plan(paths, handed, forward_batch, in_graph, in_packed_graph, may_route)
        if isinstance(outcome, PackedStep):
            decision = StepDecision(StepKind.PACKED, step=outcome)
            if self._packed_steps is not None and outcome.paths is not None:
                self._packed_steps.keep(outcome.paths, decision)
            return decision
        reason = None if isinstance(outcome, Route) else outcome
        if reason is not None:
            self._counters.fallback(reason)
        # Of several ranks, only this one may lack the memory for a plan: the others replay the packed graph.
        if in_packed_graph and (not may_route or (reason is fallback_reasons.PLAN_REFUSED and several_ranks())):
            return self._unshared(forward_batch, reason)
        return _stock(reason, in_packed_graph)

    def decide_capture(self, handed: Handed, forward_batch: Any, last: StepDecision) -> StepDecision:
        """Decides what a graph that is about to be captured holds. The batch has no paths."""
        if self.graph_variants.capturing:
            return STOCK_VARIANT
        if self.graph_is_packed(forward_batch.forward_mode):
            return self._unshared(forward_batch, None)
        return self.decide(handed, forward_batch, last, in_graph=True)

    def failed(self, error: Exception, forward_batch: Any, *, in_graph: bool, in_capture: bool) -> StepDecision:
        """Decides a step whose decision raised, before any of its layers has run.

        Ranks decide alike, so an exception that the batch causes comes on all of them. One on this rank alone must not
        choose another graph than the others: all-reduces of a graph may read the other ranks' buffers of that graph.

        Raises:
            Exception: `error`, during a capture, and where ranks might replay different graphs.
        """
        self.forget_steps()
        is_routed_packed = isinstance(error, RoutedPackedError)
        cause = error.__cause__ if is_routed_packed and error.__cause__ is not None else error
        self._counters.step_failed("step", cause)
        if not (in_graph and self.graph_is_packed(forward_batch.forward_mode)):
            self._counters.fallback(fallback_reasons.EXCEPTION)
            return _stock(fallback_reasons.EXCEPTION, False)
        if in_capture:
            raise error
        ranks = several_ranks()
        has_variant = self.graph_variants.has(forward_batch.batch_size) and not (ranks and is_routed_packed)
        if has_variant and ranks and isinstance(cause, OF_ONE_RANK):
            raise error
        self._counters.fallback(fallback_reasons.EXCEPTION)
        if has_variant:
            return _stock(fallback_reasons.EXCEPTION, True)
        return self._unshared(forward_batch, fallback_reasons.EXCEPTION)

    def forget_steps(self) -> None:
        """No step continues an earlier one."""
        if self._packed_steps is not None:
            self._packed_steps.clear()

    def _plan(
        self,
        paths: StepPaths,
        handed: Handed,
        forward_batch: Any,
        in_graph: bool,
        in_packed_graph: bool,
        may_route: bool,
    ) -> PackedStep | Route | Reason:
        """The packed step, the route of a step that goes to the stock backend, or the reason of a fallback."""
        executor = self._executor
        reason = self._unsupported(paths, forward_batch, in_graph and not in_packed_graph)
        if reason is not None:
            return reason
        mode, query_lens = paths.mode, paths.query_lens
        size, drafts = forward_batch.batch_size, None
        if size < paths.num_requests or (size > paths.num_requests and not in_graph):
            return fallback_reasons.ROW_MISMATCH
        host_lens = executor.host_lens(forward_batch, handed, paths.num_requests)
        if host_lens is None:
            return fallback_reasons.ROW_MISMATCH
        if mode == "mixed" and executor.judges_mixed and not self._packs_mixed(paths, host_lens):
            return fallback_reasons.COMPUTE_BOUND
        if mode == "verify":
            drafts = forward_batch.spec_info.draft_token_num
            assert query_lens is not None
            host_lens += query_lens
        if mode in DECODE_MODES and (
            self._router.always_stock or (may_route and self._router.decide(paths, host_lens) is Route.STOCK)
        ):
            return Route.STOCK
        try:
            return self._planned(paths, forward_batch, host_lens, in_graph, drafts)
        except Exception as error:
            raise RoutedPackedError from error

    def _planned(
        self, paths: StepPaths, forward_batch: Any, host_lens: Int64Array, in_graph: bool, drafts: int | None
    ) -> PackedStep | Reason:
        """The packed step, ready for its layers, or a reason why there is none."""
        executor = self._executor
        planners, mode, query_lens = executor.planners, paths.mode, paths.query_lens
        size = forward_batch.batch_size
        try:
            plans = [planner.plan(paths.forest, host_lens, query_lens) for planner in planners]
        except PlanError:  # contradicting input, or no memory for a plan
            self._counters.plan_refused()
            return fallback_reasons.PLAN_REFUSED
        tokens = size if query_lens is None else int(query_lens.sum())
        step = PackedStep.of(forward_batch, paths, tokens, host_lens, plans, in_graph=in_graph, drafts=drafts)
        step.may_be_padded = query_lens is not None and executor.runs_in_graphs
        if planners:
            step.kv_tokens = planners[0].kv_tokens
        try:
            executor.begin(step)
        except PlanTooLarge as too_large:
            self._counters.plan_too_large(str(too_large))
            return fallback_reasons.PLAN_TOO_LARGE
        self._counters.packed(mode, step.kv_tokens)
        return step

    def _packs_mixed(self, paths: StepPaths, host_lens: Int64Array) -> bool:
        """Whether sharing pays for a mixed step in each attention shape."""
        new = paths.query_lens
        assert new is not None
        features = StepFeatures.of(ForestFacts.of(paths.forest), host_lens)
        pairs = int(new @ (host_lens - new // 2))
        return all(mixed.packs(features, planner.shape, pairs) for planner in self._executor.planners)

    def _unsupported(self, paths: StepPaths | Reason, forward_batch: Any, in_stock_graph: bool) -> Reason | None:
        """The reason why the step cannot run packed, None if it can."""
        if forward_batch.forward_mode.is_idle():
            return fallback_reasons.IDLE
        layers = self._layers
        stock = self.why_all_stock
        if stock is not None:
            return stock
        if in_stock_graph:
            return fallback_reasons.GRAPH
        reason = paths if isinstance(paths, Reason) else self._unsupported_batch(paths, forward_batch)
        if reason is None:
            if not layers.scanned:
                layers.scan_model()
            elif not layers.some_packed:
                layers.conclude()
            return layers.why_all_stock
        return reason

    def _unsupported_batch(self, paths: StepPaths, forward_batch: Any) -> Reason | None:
        if getattr(forward_batch, "tbo_parent_token_range", None) is not None:
            return fallback_reasons.TWO_BATCH_OVERLAP
        if paths.mode == "verify":
            reason = unsupported_verify(forward_batch, paths.num_requests, self._executor.reads_trees)
            if reason is not None:
                return reason
        elif forward_batch.spec_info is not None:
            return fallback_reasons.SPECULATIVE
        if forward_batch.encoder_lens is not None:
            return fallback_reasons.ENCODER_DECODER
        if getattr(forward_batch, "multi_item_delimiter_indices", None) is not None:
            return fallback_reasons.ITEM_MASKS
        mode = forward_batch.forward_mode
        kind = "decode" if mode.is_decode() else "verify" if mode.is_target_verify() else None
        if kind != (paths.mode if paths.mode in DECODE_MODES else None):
            return fallback_reasons.ROW_MISMATCH
        return self._executor.why_stock(paths.mode)

    def _unshared(self, forward_batch: Any, reason: Reason | None) -> StepDecision:
        """A step of a packed graph without usable paths: correct, but every request reads its own KV."""
        lens = forward_batch.seq_lens_cpu
        if lens is None:  # the one wait for the device; SGLang keeps host lengths where `needs_cpu_seq_lens`
            lens = forward_batch.seq_lens.cpu()
        # At least one row, even if all are padding (an idle rank that replays along): a plan cannot be empty.
        count = max(1, forward_batch.batch_size - getattr(forward_batch, "num_padding", 0))
        host_lens: Int64Array = np.maximum(lens[:count].numpy().astype(np.int64), 1)
        drafts, query_lens = None, None
        if forward_batch.forward_mode.is_target_verify():
            drafts = forward_batch.spec_info.draft_token_num
            host_lens, query_lens = lens_after(host_lens, drafts)
        plans: list[Plan] = self._executor.unshared(host_lens, query_lens)
        tokens = forward_batch.batch_size * (drafts or 1)
        step = PackedStep.of(forward_batch, None, tokens, host_lens, plans, in_graph=True, drafts=drafts)
        self._executor.begin(step)
        return StepDecision(StepKind.UNSHARED, reason, step)
