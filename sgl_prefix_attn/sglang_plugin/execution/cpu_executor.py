"""Packed steps on a CPU. The tensors of a step are host memory, so reading them costs no synchronization."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from sgl_prefix_attn.core.attention import PartialWorkspace, packed_attention
from sgl_prefix_attn.core.draft_tables import visible_words
from sgl_prefix_attn.core.forest import Int64Array
from sgl_prefix_attn.core.planner import DeviceModel, Plan, Planner
from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.execution.layer_support import DTYPES, KvScales, layer_shape, window_left
from sgl_prefix_attn.sglang_plugin.execution.packed_step import PackedStep
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import Mode
from sgl_prefix_attn.sglang_plugin.prefix.handover import Handed
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason


class CpuExecutor:
    """Runs plans with the CPU kernels; see `Executor`.

    Args:
        settings: settings in force.
    """

    kernels = "cpu"
    runs_in_graphs = False
    reads_trees = True
    judges_mixed = False

    def __init__(self, facts: ServerFacts, settings: Settings) -> None:
        self.planners: list[Planner] = []
        self.drafts = facts.drafts
        self._speculates = facts.speculates
        self._settings = settings
        self._req_to_token_pool = facts.req_to_token_pool
        self._workspace = PartialWorkspace()
        # The present step's.
        self._seq_lens: torch.Tensor
        self._visible: torch.Tensor | None = None

    def reserve_graphs(self, max_batch: int, max_tokens: int) -> None:
        """Nothing to reserve: no graph holds CPU layers."""

    def why_stock(self, mode: Mode) -> Reason | None:
        wanted = getattr(self._settings, f"pack_{mode}")
        if mode == "verify" and wanted == "auto":
            wanted = self._settings.pack_decode
        if wanted and mode == "mixed" and self._speculates:
            return fallback_reasons.SPECULATIVE
        return None if wanted else fallback_reasons.DISABLED

    def unsupported_reason(self, layer: Any, k_cache: torch.Tensor) -> Reason | None:
        return None

    def unsupported_call(self, shape_index: int, q: torch.Tensor) -> Reason | None:
        return None if q.dtype in DTYPES else fallback_reasons.QUERY_DTYPE

    def shape_index(self, layer: Any, k_cache: torch.Tensor) -> int:
        shape = layer_shape(layer, k_cache.dtype)
        for index, planner in enumerate(self.planners):
            if planner.shape == shape:
                return index
        self.planners.append(Planner(shape, cpu_device(self._settings), max_growth=self._settings.replan_growth))
        return len(self.planners) - 1

    def seal(self) -> None:
        """Nothing to seal: host memory can be allocated during a step."""

    def host_lens(self, forward_batch: Any, handed: Handed, count: int) -> Int64Array | None:
        rows = forward_batch.req_pool_indices
        # Outside padded batches SGLang passes the tensor of the schedule batch on, and no comparison is needed.
        if len(rows) != count or (rows is not handed.rows and not torch.equal(rows, handed.rows)):
            return None
        return forward_batch.seq_lens.numpy().astype(np.int64)

    def unshared(self, host_lens: Int64Array, query_lens: Int64Array | None = None) -> list[Plan]:
        raise NotImplementedError("CPU steps are never part of a captured graph")

    def begin(self, step: PackedStep) -> None:
        self._seq_lens, self._visible = step.seq_lens, None
        if step.drafts:
            if step.trees:
                self._visible = visible_words(step.draft_mask, self._seq_lens, step.drafts)
                step.draft_mask = None
            self._seq_lens = self._seq_lens + step.drafts

    def memory_resumed(self) -> None:
        """Nothing was released: SGLang's memory saver knows device memory only."""

    def attend(
        self,
        step: PackedStep,
        shape_index: int,
        q: torch.Tensor,
        layer: Any,
        pool: Any,
        sinks: torch.Tensor | None,
        scales: KvScales,
    ) -> torch.Tensor:
        while shape_index >= len(step.plans):  # the modules of the model did not show this layer before the step
            paths = step.paths
            assert paths is not None
            step.plans.append(self.planners[len(step.plans)].plan(paths.forest, step.host_lens, paths.query_lens))
        out = packed_attention(
            q.reshape(step.num_tokens, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            step.plans[shape_index],
            req_to_token=self._req_to_token_pool.req_to_token,
            req_pool_indices=step.rows,
            seq_lens=self._seq_lens,
            scale=layer.scaling,
            k_scale=scales.k,
            v_scale=scales.v,
            logit_cap=layer.logit_cap,
            window_left=window_left(layer),
            sinks=None if sinks is None else sinks.float(),
            visible=self._visible,
            workspace=self._workspace,
            threads=self._settings.cpu_threads,
        )
        return out.view(step.num_tokens, -1)


def cpu_device(settings: Settings) -> DeviceModel:
    """The planner's model of the CPU under these settings."""
    threads = settings.cpu_threads or torch.get_num_threads()
    device = DeviceModel.cpu(threads)
    return dataclasses.replace(
        device,
        workers=settings.workers or device.workers,
        tile_rows=tuple(rows for rows in device.tile_rows if rows <= settings.max_tile_rows),
    )
