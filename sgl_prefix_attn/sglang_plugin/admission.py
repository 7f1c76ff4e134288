"""Whether the steps of a model runner, and which of them, may run packed: everything but the layers."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin import reasons, versions
from sgl_prefix_attn.sglang_plugin.cuda_steps import CudaExecutor, no_kernel
from sgl_prefix_attn.sglang_plugin.executor import CpuExecutor, Executor
from sgl_prefix_attn.sglang_plugin.inner import is_cpu
from sgl_prefix_attn.sglang_plugin.tracker import StepPaths

logger = logging.getLogger(__name__)


def make_executor(runner: Any, settings: Settings) -> Executor:
    """What runs the packed steps of a model runner."""
    return CpuExecutor(runner, settings) if is_cpu(runner) else CudaExecutor(runner, settings)


def never_packed(runner: Any) -> str | None:
    """Why this runner's steps never run packed, None if they may."""
    if getattr(runner, "is_draft_worker", False):
        return reasons.DRAFT_WORKER
    if getattr(runner.model_config, "is_encoder_decoder", False):
        return reasons.ENCODER_DECODER
    if versions.has_sliding_window_pool(runner.token_to_kv_pool):
        return reasons.HYBRID_SWA
    return None if is_cpu(runner) else _never_on_a_gpu(runner)


def _never_on_a_gpu(runner: Any) -> str | None:
    """As `never_packed`, for what decides which layers captured graphs hold and so cannot wait for a step."""
    device = torch.device(str(runner.device))
    problem = no_kernel(device) if device.type == "cuda" else f"the device is {device}"
    if problem is not None:
        logger.warning("prefixpack: all steps run on the inner backend: %s", problem)
        return reasons.NO_CUDA_KERNEL
    arguments = runner.server_args
    if arguments.disable_radix_cache:
        return reasons.NO_RADIX_CACHE
    if arguments.enable_two_batch_overlap:
        return reasons.TWO_BATCH_OVERLAP
    if arguments.enable_pdmux:
        return reasons.PDMUX
    return None


def admit(paths: StepPaths | str, forward_batch: Any, executor: Executor) -> StepPaths | str:
    """The paths if a step of this kind can run packed, else the reason why not."""
    if isinstance(paths, str):
        return paths
    if getattr(forward_batch, "tbo_parent_token_range", None) is not None:
        return reasons.TWO_BATCH_OVERLAP
    if forward_batch.spec_info is not None:
        return reasons.SPECULATIVE
    if forward_batch.encoder_lens is not None:
        return reasons.ENCODER_DECODER
    if forward_batch.forward_mode.is_decode() != (paths.mode == "decode"):
        return reasons.ROW_MISMATCH
    return executor.packs(paths.mode) or paths
