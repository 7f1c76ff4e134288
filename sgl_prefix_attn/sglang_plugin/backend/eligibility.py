"""Which model runners may run packed steps: conditions that hold for the life of a server."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import is_cpu, knows_kv_scales
from sgl_prefix_attn.sglang_plugin.execution import trtllm_mha
from sgl_prefix_attn.sglang_plugin.execution.cpu_executor import CpuExecutor
from sgl_prefix_attn.sglang_plugin.execution.cuda_executor import CudaExecutor
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.kernel_set import choose_kernels
from sgl_prefix_attn.sglang_plugin.execution.layer_registry import LayerRegistry, common_reason
from sgl_prefix_attn.sglang_plugin.execution.layer_support import attention_layers
from sgl_prefix_attn.sglang_plugin.execution.pool_support import names_virtual_slots, unsupported_pool
from sgl_prefix_attn.sglang_plugin.prefix.batch_tracker import DECODE_MODES, MODES, Mode
from sgl_prefix_attn.sglang_plugin.telemetry import fallback_reasons
from sgl_prefix_attn.sglang_plugin.telemetry.counters import Counters
from sgl_prefix_attn.sglang_plugin.telemetry.fallback_reasons import Reason, Refused

logger = logging.getLogger(__name__)


# By stock backend: SGLang's classes that prefixpack knows how to stand in for.
STOCK_CLASSES = {
    "fa3": "FlashAttentionBackend",
    "flashinfer": "FlashInferAttnBackend",
    "triton": "TritonAttnBackend",
    trtllm_mha.NAME: "TRTLLMHAAttnBackend",
    "torch_native": "TorchNativeAttnBackend",
}
_PREFILL_MODES = tuple(mode for mode in MODES if mode not in DECODE_MODES)
# Arguments with which one kernel computes all layers of a decode step, in 0.5.23 and later.
_WHOLE_MODEL_KERNELS = ("enable_nvidia_megakernel", "enable_amd_monokernel")
# Models that read `forward_metadata` of the current backend in their own code.
_READ_METADATA = ("InklingForConditionalGeneration", "InklingForConditionalGenerationMTP")


def server_refusal(runner: Any) -> Reason | None:
    """The reason why no step of a server ever runs packed, whatever its device; None if some may."""
    if getattr(runner, "is_draft_worker", False):
        return fallback_reasons.DRAFT_WORKER
    if getattr(runner.model_config, "is_encoder_decoder", False):
        return fallback_reasons.ENCODER_DECODER
    reason = unsupported_kv(runner)
    if reason is not None:
        return reason
    if versions.has_decode_context_parallel(runner):
        return fallback_reasons.DECODE_CONTEXT_PARALLEL
    if versions.argument(runner, "enable_deterministic_inference") or versions.argument(runner, "rl_on_policy_target"):
        return fallback_reasons.DETERMINISTIC
    if versions.argument(runner, "disable_radix_cache"):
        return fallback_reasons.NO_RADIX_CACHE
    if versions.hides_its_tree(runner):
        return fallback_reasons.UNKNOWN_TREE
    if versions.argument(runner, "enable_two_batch_overlap"):
        return fallback_reasons.TWO_BATCH_OVERLAP
    if versions.argument(runner, "enable_pdmux"):
        return fallback_reasons.PDMUX
    if versions.argument(runner, "dllm_algorithm"):
        return fallback_reasons.MODE
    if any(versions.argument(runner, name) for name in _WHOLE_MODEL_KERNELS):
        return fallback_reasons.WHOLE_MODEL_KERNEL
    return None


def unsupported_kv(runner: Any) -> Reason | None:
    """The reason why the packed path can read no layer's KV in this runner, None if it may read some."""
    if versions.argument(runner, "enable_unified_memory") or names_virtual_slots(runner):
        return fallback_reasons.VIRTUAL_SLOTS
    return unsupported_pool(runner.token_to_kv_pool)


def choose_executor(runner: Any, settings: Settings, name: str) -> Executor | Reason:
    """The executor of a model runner, or the reason why none of its steps ever runs packed. Changes nothing.

    Args:
        runner: SGLang's ModelRunner, with its model and KV pool.
        settings: settings in force.
        name: the stock backend's name.
    """
    executor = server_refusal(runner) or device_executor(runner, settings, name)
    if isinstance(executor, Reason) or is_cpu(runner) or not versions.speculates(runner):
        return executor
    return executor.why_stock("verify") or executor  # nearly all steps are of this kind


def device_executor(runner: Any, settings: Settings, name: str) -> Executor | Reason:
    """The executor of a runner's device, or the reason why there is none. Arguments: see `choose_executor`."""
    if is_cpu(runner):
        return CpuExecutor(runner, settings)
    kernels = choose_kernels(settings.gpu_kernels, torch.device(str(runner.device)))
    if isinstance(kernels, Refused):
        logger.warning("prefixpack: all steps run on the stock backend: %s", kernels.detail)
        return kernels.reason
    return CudaExecutor(runner, settings, kernels, name)


def make_executor(runner: Any, settings: Settings, name: str) -> Executor | Reason:
    """As `choose_executor`, and keeps SGLang from graphs that would hold a plan."""
    executor = choose_executor(runner, settings, name)
    if (
        not isinstance(executor, Reason)
        and executor.runs_in_graphs
        and versions.keep_metadata_out_of_graphs(os.environ)
    ):
        logger.warning("prefixpack: %s is switched off: plans are made anew by the host", versions.GLUE_VARIABLE)
    return executor


def wrap_refusal(runner: Any, name: str, stock: Any, settings: Settings) -> Reason | None:
    """The reason why a stock backend is not wrapped, None if it is. Changes nothing and allocates no device memory.

    Under our own name SGLang refuses some servers, and others are left as they are if their steps run stock. Here a
    wrapper without a packed step would only cost time, so everything that is not known to pack is refused.

    Args:
        runner: SGLang's ModelRunner, with its model and KV pool.
        name: the stock backend's name.
        stock: the stock backend.
        settings: settings in force.
    """
    if getattr(runner, "use_mla_backend", False):
        return fallback_reasons.MLA
    if not _is_sglangs(stock, name):
        return fallback_reasons.UNKNOWN_STOCK
    executor = choose_executor(runner, settings, name)
    if isinstance(executor, Reason):
        return executor
    writers = trtllm_mha.WRITE_THROUGH_IT if name == trtllm_mha.NAME else ()
    if set(versions.architectures(runner)) & {*_READ_METADATA, *writers}:
        return fallback_reasons.READS_METADATA
    modes = _modes_of(runner, name)
    reason = no_packed_steps(runner, settings, executor, modes)
    if reason is not None:
        return reason
    masked = name != "torch_native" and hasattr(getattr(runner, "model", None), "prepare_attn_masks")
    if masked and any(why_stock(executor, settings, mode) is None for mode in _PREFILL_MODES if mode in modes):
        return fallback_reasons.IMAGE_MASKS
    reason = unsupported_model(runner, name, executor)
    if reason is None and name == trtllm_mha.NAME:
        packed = [layer for layer, reason in _judged_layers(runner, name, executor) if reason is None]
        return trtllm_mha.unsupported_view(stock, packed, runner.token_to_kv_pool)
    return reason


def _is_sglangs(stock: Any, name: str) -> bool:
    """Whether a stock backend computes layers as SGLang's class does: another plug-in may have put a subclass there."""
    classes = type(stock).__mro__
    known = next((index for index, kind in enumerate(classes) if kind.__name__ == STOCK_CLASSES[name]), None)
    if known is None:
        return False
    return not any(method in vars(kind) for kind in classes[:known] for method in ("forward_decode", "forward_extend"))


def no_packed_steps(
    runner: Any, settings: Settings, executor: Executor, modes: tuple[Mode, ...] = MODES
) -> Reason | None:
    """The reason why no kind of step that a server has runs packed, None if one may."""
    reasons = [why_stock(executor, settings, mode) for mode in modes if has_steps(runner, mode)]
    if None in reasons:
        return None
    return fallback_reasons.PREFILL_ONLY if versions.has_no_decode_steps(runner) or not reasons else reasons[0]


def unsupported_at_start(runner: Any, name: str, settings: Settings, executor: Executor) -> Reason | None:
    """The reason why, under our own name, the steps of a server with an executor never run packed; None if some may."""
    if versions.has_no_decode_steps(runner):
        reason = no_packed_steps(runner, settings, executor)
        if reason is not None:
            return reason
    return unsupported_model(runner, name, executor)


def unsupported_model(runner: Any, name: str, executor: Executor) -> Reason | None:
    """The reason why no layer of a model runs packed, None if one may or if the model does not show its layers.

    Allocates no device memory.

    Args:
        runner: SGLang's ModelRunner, with its model and KV pool.
        name: the stock backend's name.
        executor: of the runner.
    """
    return common_reason({reason for _, reason in _judged_layers(runner, name, executor)})


def _judged_layers(runner: Any, name: str, executor: Executor) -> list[tuple[Any, Reason | None]]:
    """The layers that a model shows, each with the reason why it does not run packed."""
    registry = LayerRegistry(runner, executor, Counters(), None, knows_kv_scales(name))
    layers = attention_layers(getattr(runner, "model", None))
    return [(layer, registry.unsupported_reason(layer)) for layer in layers]


def why_stock(executor: Executor, settings: Settings, mode: Mode) -> Reason | None:
    """The reason why settings and device keep steps of a kind from running packed, None if they do not."""
    if mode in ("decode", "verify") and settings.policy.fixed == "stock":
        return fallback_reasons.DISABLED
    return executor.why_stock(mode)


def has_steps(runner: Any, mode: Mode) -> bool:
    """Whether a server has steps of a kind."""
    if mode in ("decode", "mixed", "verify") and versions.has_no_decode_steps(runner):
        return False
    if mode == "mixed":
        return versions.mixes_chunks(runner) or versions.attention_dp_ranks(runner) > 1
    return mode != "verify" or versions.speculates(runner)


def _modes_of(runner: Any, name: str) -> tuple[Mode, ...]:
    """The kinds of steps that a target model's backend gets: SGLang may run prefill and decode on different ones."""
    prefill, decode = versions.backend_names(runner)
    if prefill == decode or name not in (prefill, decode):
        return MODES
    return tuple(mode for mode in MODES if (mode in _PREFILL_MODES) == (name == prefill))
