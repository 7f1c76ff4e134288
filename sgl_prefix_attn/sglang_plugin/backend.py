"""The attention backend `prefixpack`: packed attention where it applies, the inner stock backend everywhere else."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sgl_prefix_attn.core.attention import PartialWorkspace, packed_attention
from sgl_prefix_attn.core.planner import DeviceModel, KvTokens, ModelShape, Plan, Planner
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin import cpu_traps, hooks, reasons, versions
from sgl_prefix_attn.sglang_plugin import runtime as runtime_module
from sgl_prefix_attn.sglang_plugin.delegation import delegate
from sgl_prefix_attn.sglang_plugin.handover import Handed, Kind
from sgl_prefix_attn.sglang_plugin.inner import build_inner, inner_name, is_cpu
from sgl_prefix_attn.sglang_plugin.layers import (
    DTYPES,
    attention_layers,
    layer_shape,
    unsupported_buffers,
    unsupported_layer,
    window_left,
)
from sgl_prefix_attn.sglang_plugin.runtime import Runtime
from sgl_prefix_attn.sglang_plugin.tracker import StepPaths

logger = logging.getLogger(__name__)

NO_KV_TOKENS = KvTokens(0, 0, 0)
# A plan stays right at any lengths: its tails are open-ended. Only its balance drifts as they grow, slowly, so in a
# steady decode the planner is asked every so many steps.
STEPS_WITHOUT_A_LOOK = 8


@dataclass(frozen=True)
class _LayerFacts:
    """What is looked up once per layer; holds the layer, so that its id() stays its own.

    Attributes:
        obstacle: why the layer never runs packed, None if it does.
        slot: index of its shape's planner and plan; -1 with an obstacle.
    """

    layer: Any
    obstacle: str | None
    slot: int


@dataclass
class _PackedStep:
    """A step that runs packed: set up with the metadata, used by every layer. Steady decode steps reuse the object.

    Attributes:
        num_tokens: rows of q.
        rows: [num_requests] int64 rows of req_to_token.
        seq_lens: [num_requests] int64 KV lengths, the step's own tokens included.
        plans: by slot of the planner.
        kv_tokens: KV reads of the step that the planner was last asked for.
        age: steps since then.
    """

    paths: StepPaths
    forward_mode: Any
    num_tokens: int
    rows: torch.Tensor
    seq_lens: torch.Tensor
    plans: list[Plan]
    kv_tokens: KvTokens
    age: int = 0

    def continues_with(self, forward_batch: Any) -> bool:
        """Takes over a decode batch that has the same paths; False if the planner has to see it."""
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if (
            self.age + 1 >= STEPS_WITHOUT_A_LOOK
            or self.paths.query_lens is not None
            or forward_batch.forward_mode is not self.forward_mode
            or forward_batch.batch_size != self.paths.num_requests
            or forward_batch.spec_info is not None
            or forward_batch.tbo_parent_token_range is not None
            or rows.dtype is not torch.int64
            or seq_lens.dtype is not torch.int64
        ):
            return False
        self.rows, self.seq_lens = rows, seq_lens
        self.age += 1
        return True


@delegate(AttentionBackend, "inner")
class PrefixPackBackend(AttentionBackend):
    """Runs decode, extend over a cached prefix and mixed steps packed; hands all else to `inner`, counted by reason.

    Args:
        runner: SGLang's ModelRunner.
        inner: the stock backend; every member of the base class that is not defined here is answered by it.
        runtime: what the backends of this process share.
    """

    # The planner reads lengths on the host.
    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, inner: Any, runtime: Runtime) -> None:
        self.inner = inner
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._runner = runner
        self._runtime = runtime
        self._counters = runtime.counters
        self._settings = runtime.settings
        self._never = _never_packed(runner)
        self._planners: list[Planner] = []
        self._layers: dict[int, _LayerFacts] = {}
        self._layers_seen = False
        self._any_layer_falls_back = False
        self._workspace = PartialWorkspace()
        self._step: _PackedStep | None = None
        self._inner_ready = False

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: __init__ has not run
            raise AttributeError(name)
        return getattr(self.inner, name)

    # Metadata -------------------------------------------------------------------------------------------------------

    def prepare_schedule_batch(self, batch: Any) -> None:
        """Called by an SGLang that carries our patch, once per step before the ForwardBatch is built."""
        if self._runtime.handover.kind == "patch":
            self._runtime.handover.prepare(batch)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._begin(forward_batch, in_graph=False)
        # A packed step needs the inner metadata only if one of its layers will run there.
        if self._step is None or self._any_layer_falls_back:
            self._init_inner(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._begin(forward_batch, in_graph=True)
        self.inner.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._inner_ready = True

    def _init_inner(self, forward_batch: Any) -> None:
        self.inner.init_forward_metadata(forward_batch)
        self._inner_ready = True

    def _begin(self, forward_batch: Any, *, in_graph: bool) -> None:
        """Decides how the step runs, and plans it if packed. Every step pays for this: few calls, no copies."""
        start = time.perf_counter()
        # Taken in any case: it must not stay for a later forward.
        handed = self._runtime.handover.take()
        last, self._step, self._inner_ready = self._step, None, False
        if last is not None and handed.step is last.paths and not in_graph and last.continues_with(forward_batch):
            self._step = last
            self._runtime.last_packed = handed
            self._counters.packed_on(last.paths.num_requests, last.kv_tokens, last.age)
        else:
            admitted = self._admit(handed.step, forward_batch, in_graph)
            reason = admitted if isinstance(admitted, str) else self._plan_step(admitted, handed, forward_batch)
            if reason is not None:
                self._counters.fallback(reason)
        self._counters.host_seconds += time.perf_counter() - start
        if self._runtime.exporter is not None:
            self._runtime.step_done()

    def _admit(self, paths: StepPaths | str, forward_batch: Any, in_graph: bool) -> StepPaths | str:
        """The paths if this kind of step can run packed, else the reason why not."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return reasons.IDLE
        if self._never is not None:
            return self._never
        if in_graph:
            return reasons.GRAPH
        if isinstance(paths, str):
            return paths
        if getattr(forward_batch, "tbo_parent_token_range", None) is not None:
            return reasons.TWO_BATCH_OVERLAP
        if forward_batch.spec_info is not None:
            return reasons.SPECULATIVE
        if forward_batch.encoder_lens is not None:
            return reasons.ENCODER_DECODER
        if mode.is_decode() != (paths.mode == "decode"):
            return reasons.ROW_MISMATCH
        if not getattr(self._settings, f"pack_{paths.mode}"):
            return reasons.DISABLED
        if not self._layers_seen:
            self._look_at_layers()
        return paths

    def _plan_step(self, paths: StepPaths, handed: Handed, forward_batch: Any) -> str | None:
        """Makes the step packed; returns a reason if that cannot be."""
        rows, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if rows.shape[0] != paths.num_requests or not torch.equal(rows, handed.rows):
            return reasons.ROW_MISMATCH
        rows, seq_lens = _as_int64(rows), _as_int64(seq_lens)
        host_lens = seq_lens.numpy()
        try:
            plans = [planner.plan(paths.forest, host_lens, paths.query_lens) for planner in self._planners]
        except ValueError:
            self._counters.plan_refused()
            return reasons.PLAN_REFUSED
        tokens = paths.num_requests if paths.query_lens is None else int(paths.query_lens.sum())
        kv_tokens = self._planners[0].kv_tokens if self._planners else NO_KV_TOKENS
        self._step = _PackedStep(paths, forward_batch.forward_mode, tokens, rows, seq_lens, plans, kv_tokens)
        self._counters.packed(paths.mode, kv_tokens)
        self._runtime.planner = self._planners[0] if self._planners else None
        self._runtime.last_packed = handed
        return None

    def _look_at_layers(self) -> None:
        """Learns from the model, once, which layers there are, so that planning happens before the forward."""
        self._layers_seen = True
        for layer in attention_layers(getattr(self._runner, "model", None)):
            self._facts(layer)

    def _slot(self, shape: ModelShape) -> int:
        """Index of the planner for a shape."""
        for slot, planner in enumerate(self._planners):
            if planner.shape == shape:
                return slot
        planner = Planner(shape, cpu_device(self._settings), max_growth=self._settings.replan_growth)
        self._planners.append(planner)
        self._counters.planners.append(planner)
        return len(self._planners) - 1

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
        return self._attend(self.inner.forward, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        return self._attend(self.inner.forward_decode, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        return self._attend(self.inner.forward_extend, q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _attend(
        self,
        inner_forward: Callable[..., Any],
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> Any:
        step = self._step
        if step is not None:
            facts = self._facts(layer)
            reason = facts.obstacle or _call_obstacle(step, q, layer, kwargs)
            if reason is None:
                if save_kv_cache and k is not None and v is not None:
                    self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
                return self._packed(step, facts.slot, q, layer, kwargs.get("sinks"))
            self._counters.fallback(reason)
            if not self._inner_ready:
                self._init_inner(forward_batch)
        return inner_forward(
            q=q, k=k, v=v, layer=layer, forward_batch=forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )

    def _packed(
        self, step: _PackedStep, slot: int, q: torch.Tensor, layer: Any, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        while slot >= len(step.plans):  # the layer was not among those that the model showed beforehand
            planner = self._planners[len(step.plans)]
            step.plans.append(planner.plan(step.paths.forest, step.seq_lens.numpy(), step.paths.query_lens))
        out = packed_attention(
            q.reshape(step.num_tokens, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            step.plans[slot],
            req_to_token=self.req_to_token_pool.req_to_token,
            req_pool_indices=step.rows,
            seq_lens=step.seq_lens,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            window_left=window_left(layer),
            sinks=None if sinks is None else sinks.float(),
            workspace=self._workspace,
            threads=self._settings.cpu_threads,
        )
        return out.view(step.num_tokens, -1)

    def _facts(self, layer: Any) -> _LayerFacts:
        facts = self._layers.get(id(layer))
        if facts is None:
            k_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            v_cache = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            obstacle = unsupported_layer(layer) or unsupported_buffers(layer, k_cache, v_cache)
            facts = _LayerFacts(layer, obstacle, -1 if obstacle else self._slot(layer_shape(layer, k_cache.dtype)))
            self._layers[id(layer)] = facts
            self._any_layer_falls_back |= obstacle is not None
        return facts


def _as_int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int64).contiguous()


def _call_obstacle(step: _PackedStep, q: torch.Tensor | None, layer: Any, kwargs: dict[str, Any]) -> str | None:
    """Why this call of a layer cannot run packed, None if it can."""
    if kwargs and any(value is not None and name != "sinks" for name, value in kwargs.items()):
        return reasons.CALL_ARGUMENTS
    if q is None or q.numel() != step.num_tokens * layer.tp_q_head_num * layer.qk_head_dim:
        return reasons.ROW_MISMATCH
    if q.dtype not in DTYPES:
        return reasons.QUERY_DTYPE
    return None


def cpu_device(settings: Settings) -> DeviceModel:
    """The planner's view of the CPU under these settings."""
    threads = settings.cpu_threads or torch.get_num_threads()
    device = DeviceModel.cpu(threads)
    return dataclasses.replace(
        device,
        workers=settings.workers or device.workers,
        tile_rows=tuple(rows for rows in device.tile_rows if rows <= settings.max_tile_rows),
    )


def _never_packed(runner: Any) -> str | None:
    """Why this runner's steps never run packed, None if they may."""
    if getattr(runner, "is_draft_worker", False):
        return reasons.DRAFT_WORKER
    if getattr(runner.model_config, "is_encoder_decoder", False):
        return reasons.ENCODER_DECODER
    if versions.has_sliding_window_pool(runner.token_to_kv_pool):
        return reasons.HYBRID_SWA
    if not is_cpu(runner):
        return reasons.NO_CUDA_KERNEL
    return None


def create_backend(runner: Any, settings: Settings) -> PrefixPackBackend:
    """The factory behind the name `prefixpack`.

    Raises:
        ValueError: an MLA model, an inner backend that cannot work here, or `handover=patch` without the patch.
    """
    version = versions.installed_version()
    if runner.use_mla_backend:
        raise ValueError(
            "attention backend 'prefixpack' does not support models with multi-head latent attention (MLA); start "
            "SGLang with another --attention-backend for this model"
        )
    name = inner_name(runner, settings.inner_backend)
    kind = handover_kind(settings, version)
    runtime = runtime_module.start(settings, version, kind, runner)
    runtime.inner_backend = name
    wanted = hooks.OTHER_HOOKS + (hooks.HANDOVER_HOOKS if kind == "hooks" else ())
    if is_cpu(runner):
        cpu_traps.note_cpu_backend()
        wanted += hooks.cpu_hooks()
    for hook in hooks.ensure_applied(wanted):
        logger.error("prefixpack: could not hook %s in SGLang %s, so %s", hook.target.path, version, hook.consequence)
    if versions.ask_for_readable_tree_core(os.environ):
        logger.warning(
            "prefixpack: the native radix tree core of SGLang %s cannot tell which requests share a prefix; using its "
            "Python core (%s=python)",
            version,
            versions.TREE_CORE_VARIABLE,
        )
    backend = PrefixPackBackend(runner, build_inner(runner, name), runtime)
    logger.info("prefixpack: inner backend %s, paths through %s, SGLang %s", name, kind, version)
    return backend


def handover_kind(settings: Settings, version: str) -> Kind:
    """How paths are handed over under these settings with the installed SGLang."""
    patched = versions.has_native_seam()
    if settings.handover == "patch" and not patched:
        raise ValueError(
            f"handover='patch', but the installed SGLang {version} does not carry the patch; apply it with "
            "`python -m sgl_prefix_attn patch apply`, or set handover to 'auto' or 'hooks'"
        )
    return "patch" if patched and settings.handover != "hooks" else "hooks"
