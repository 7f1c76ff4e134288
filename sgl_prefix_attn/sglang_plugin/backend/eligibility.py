"""Which servers may run packed steps: conditions that hold for the life of a server."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from sgl_prefix_attn.settings import Settings
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts
from sgl_prefix_attn.sglang_plugin.compat.stock_backend import knows_kv_scales
from sgl_prefix_attn.sglang_plugin.execution import trtllm_mha
from sgl_prefix_attn.sglang_plugin.execution.cpu_executor import CpuExecutor
from sgl_prefix_attn.sglang_plugin.execution.cuda_executor import CudaExecutor
from sgl_prefix_attn.sglang_plugin.execution.executor import Executor
from sgl_prefix_attn.sglang_plugin.execution.kernel_set import choose_kernels
from sgl_prefix_attn.sglang_plugin.execution.layer_registry import LayerRegistry
from sgl_prefix_attn.sglang_plugin.execution.pool_support import unsupported_pool
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


def server_refusal(facts: ServerFacts) -> Reason | None:
    """The reason why no step of a server ever runs packed, whatever its device; None if some may."""
    arguments, kv = facts.argument, unsupported_kv(facts)
    deterministic = arguments("enable_deterministic_inference") or arguments("rl_on_policy_target")
    found = (
        (facts.is_draft_worker, fallback_reasons.DRAFT_WORKER),
        (facts.is_encoder_decoder, fallback_reasons.ENCODER_DECODER),
        (kv is not None, kv),
        (facts.has_decode_context_parallel, fallback_reasons.DECODE_CONTEXT_PARALLEL),
        (deterministic, fallback_reasons.DETERMINISTIC),
        (arguments("disable_radix_cache"), fallback_reasons.NO_RADIX_CACHE),
        (facts.hides_its_tree, fallback_reasons.UNKNOWN_TREE),
        (arguments("enable_two_batch_overlap"), fallback_reasons.TWO_BATCH_OVERLAP),
        (arguments("enable_pdmux"), fallback_reasons.PDMUX),
        (arguments("dllm_algorithm"), fallback_reasons.MODE),
        (any(map(arguments, _WHOLE_MODEL_KERNELS)), fallback_reasons.WHOLE_MODEL_KERNEL),
    )
    return next((reason for applies, reason in found if applies), None)


def unsupported_kv(facts: ServerFacts) -> Reason | None:
    """The reason why the packed path can read no layer's KV of a server, None if it may read some."""
    if facts.argument("enable_unified_memory") or facts.translates_slots:
        return fallback_reasons.VIRTUAL_SLOTS
    return unsupported_pool(facts.token_to_kv_pool)


def choose_executor(facts: ServerFacts, settings: Settings, name: str) -> Executor | Reason:
    """The executor of a server, or the reason why none of its steps ever runs packed. Changes nothing.

    Args:
        settings: settings in force.
        name: the stock backend's name.
    """
    executor = server_refusal(facts) or device_executor(facts, settings, name)
    if isinstance(executor, Reason) or facts.is_cpu or not facts.speculates:
        return executor
    return executor.why_stock("verify") or executor  # nearly all steps are of this kind


def device_executor(facts: ServerFacts, settings: Settings, name: str) -> Executor | Reason:
    """The executor of a server's device, or the reason why there is none. Arguments: see `choose_executor`."""
    if facts.is_cpu:
        return CpuExecutor(facts, settings)
    kernels = choose_kernels(settings.gpu_kernels, torch.device(facts.device))
    if isinstance(kernels, Refused):
        logger.warning("prefixpack: all steps run on the stock backend: %s", kernels.detail)
        return kernels.reason
    return CudaExecutor(facts, settings, kernels, name)


def executor_at_start(facts: ServerFacts, settings: Settings, name: str) -> Executor | Reason:
    """The executor under our own name; the reason also where no layer or kind of step can run packed.

    Arguments: see `choose_executor`.
    """
    executor = choose_executor(facts, settings, name)
    if isinstance(executor, Reason):
        return executor
    reason = no_packed_steps(facts, settings, executor) if facts.has_no_decode_steps else None
    return reason or _layers(facts, name, executor).unsupported_model() or executor


def make_executor(facts: ServerFacts, settings: Settings, name: str) -> Executor | Reason:
    """As `choose_executor`, and keeps SGLang from graphs that would hold a plan."""
    return out_of_graphs(choose_executor(facts, settings, name))


def out_of_graphs(executor: Executor | Reason) -> Executor | Reason:
    """The same executor, with SGLang kept from graphs that would hold its plan."""
    if (
        not isinstance(executor, Reason)
        and executor.runs_in_graphs
        and versions.keep_metadata_out_of_graphs(os.environ)
    ):
        logger.warning("prefixpack: %s is switched off: plans are made anew by the host", versions.GLUE_VARIABLE)
    return executor


def wrap_refusal(facts: ServerFacts, name: str, stock: Any, settings: Settings) -> Reason | None:
    """The reason why a stock backend is not wrapped, None if it is. Changes nothing and allocates no device memory.

    Under our own name SGLang refuses some servers, and others are left as they are if their steps run stock. Here a
    wrapper without a packed step would only cost time, so everything that is not known to pack is refused.

    Args:
        name: the stock backend's name.
        stock: the stock backend.
        settings: settings in force.
    """
    if facts.use_mla_backend:
        return fallback_reasons.MLA
    if not _is_sglangs(stock, name):
        return fallback_reasons.UNKNOWN_STOCK
    executor = choose_executor(facts, settings, name)
    if isinstance(executor, Reason):
        return executor
    writers = trtllm_mha.WRITE_THROUGH_IT if name == trtllm_mha.NAME else ()
    if set(facts.architectures) & {*_READ_METADATA, *writers}:
        return fallback_reasons.READS_METADATA
    modes = _modes_of(facts, name)
    reason = no_packed_steps(facts, settings, executor, modes)
    if reason is not None:
        return reason
    masked = name != "torch_native" and facts.masks_images
    if masked and any(why_stock(executor, settings, mode) is None for mode in _PREFILL_MODES if mode in modes):
        return fallback_reasons.IMAGE_MASKS
    layers = _layers(facts, name, executor)
    reason = layers.unsupported_model()
    if reason is None and name == trtllm_mha.NAME:
        packed = [layer for layer, reason in layers.judged() if reason is None]
        return trtllm_mha.unsupported_view(stock, packed, facts.token_to_kv_pool)
    return reason


def _is_sglangs(stock: Any, name: str) -> bool:
    """Whether a stock backend computes layers as SGLang's class does: another plug-in may have put a subclass there."""
    classes = type(stock).__mro__
    known = next((index for index, kind in enumerate(classes) if kind.__name__ == STOCK_CLASSES[name]), None)
    if known is None:
        return False
    return not any(method in vars(kind) for kind in classes[:known] for method in ("forward_decode", "forward_extend"))


def no_packed_steps(
    facts: ServerFacts, settings: Settings, executor: Executor, modes: tuple[Mode, ...] = MODES
) -> Reason | None:
    """The reason why no kind of step that a server has runs packed, None if one may."""
    reasons = [why_stock(executor, settings, mode) for mode in modes if has_steps(facts, mode)]
    if None in reasons:
        return None
    return fallback_reasons.PREFILL_ONLY if facts.has_no_decode_steps or not reasons else reasons[0]


def _layers(facts: ServerFacts, name: str, executor: Executor) -> LayerRegistry:
    """A registry that judges the layers that the model shows."""
    return LayerRegistry(facts, executor, Counters(), None, knows_kv_scales(name))


def why_stock(executor: Executor, settings: Settings, mode: Mode) -> Reason | None:
    """The reason why settings and device keep steps of a kind from running packed, None if they do not."""
    if mode in ("decode", "verify") and settings.policy.fixed == "stock":
        return fallback_reasons.DISABLED
    return executor.why_stock(mode)


def has_steps(facts: ServerFacts, mode: Mode) -> bool:
    """Whether a server has steps of a kind."""
    if mode in ("decode", "mixed", "verify") and facts.has_no_decode_steps:
        return False
    if mode == "mixed":
        return facts.mixes_chunks or facts.attention_dp_ranks > 1
    return mode != "verify" or facts.speculates


def _modes_of(facts: ServerFacts, name: str) -> tuple[Mode, ...]:
    """The kinds of steps that a target model's backend gets: SGLang may run prefill and decode on different ones."""
    prefill, decode = facts.backend_names
    if prefill == decode or name not in (prefill, decode):
        return MODES
    return tuple(mode for mode in MODES if (mode in _PREFILL_MODES) == (name == prefill))
