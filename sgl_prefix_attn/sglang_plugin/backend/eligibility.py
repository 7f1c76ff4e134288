"""Which model runners may run packed steps: conditions that hold for the life of a server."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import is_cpu
from sgl_prefix_attn.sglang_plugin.execution.cpu_executor import CpuExecutor
from sgl_prefix_attn.sglang_plugin.execution.cuda_executor import CudaExecutor
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.kernel_set import choose_kernels
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons

logger = logging.getLogger(__name__)


def make_executor(runner: Any, settings: Settings) -> Executor | str:
    """The executor of a model runner, or the reason why none of its steps ever runs packed."""
    if getattr(runner, "is_draft_worker", False):
        return fallback_reasons.DRAFT_WORKER
    if getattr(runner.model_config, "is_encoder_decoder", False):
        return fallback_reasons.ENCODER_DECODER
    if versions.has_sliding_window_pool(runner.token_to_kv_pool):
        return fallback_reasons.HYBRID_SWA
    if versions.has_decode_context_parallel(runner):
        return fallback_reasons.DECODE_CONTEXT_PARALLEL
    if versions.speculates(runner) and not is_cpu(runner):
        return fallback_reasons.SPECULATIVE
    return CpuExecutor(runner, settings) if is_cpu(runner) else _gpu_executor(runner, settings)


def _gpu_executor(runner: Any, settings: Settings) -> Executor | str:
    """As `make_executor`. Captured graphs fix which layers are packed, so these conditions are checked at the start."""
    kernels = choose_kernels(settings.gpu_kernels, torch.device(str(runner.device)))
    if isinstance(kernels, str):
        logger.warning("prefixpack: all steps run on the stock backend: %s", kernels)
        return fallback_reasons.NO_CUDA_KERNEL
    arguments = runner.server_args
    if arguments.disable_radix_cache:
        return fallback_reasons.NO_RADIX_CACHE
    if arguments.enable_two_batch_overlap:
        return fallback_reasons.TWO_BATCH_OVERLAP
    if arguments.enable_pdmux:
        return fallback_reasons.PDMUX
    if versions.keep_metadata_out_of_graphs(os.environ):
        logger.warning("prefixpack: %s is switched off: plans are made anew by the host", versions.GLUE_VARIABLE)
    return CudaExecutor(runner, settings, kernels)
