"""Names of SGLang that the doctor replaces, or loads before it does. Data only.

The doctor lets PyTorch answer for the GPU of another machine. These functions ask something else, or another process.
"""

from __future__ import annotations

from sgl_prefix_attn.sglang_plugin.compat.targets import Target, Use, attributes_of

COMMON = "sglang.srt.utils.common"
PLATFORMS = "sglang.srt.platforms"
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"  # makes a CPU the device even where a GPU is
ARGUMENT_GROUPS = "sglang.srt.arg_groups"
REPLACED_PROBES = ("get_nvgpu_memory_capacity", "is_flashinfer_available", "get_device_sm")
# Modules whose import asks for the GPU, and what else resolving arguments or planning a runner imports.
PRELOADED = (
    "sglang.srt.server_args",
    "sglang.srt.configs.model_config",
    "sglang.srt.model_loader",
    "sglang.srt.models.registry",
    "sglang.srt.layers.radix_attention",
    "sglang.srt.layers.attention.trtllm_mha_backend",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.swa_memory_pool",
)

DOCTOR_TARGETS = (
    *(Target(f"utils.common.{name}", Use.CALL) for name in REPLACED_PROBES),
    *attributes_of("platforms", "_current_platform current_platform"),
    Target("platforms.CudaSRTPlatform", Use.CLASS),
    *(Target(name.removeprefix("sglang.srt."), Use.ATTRIBUTE) for name in (*PRELOADED, ARGUMENT_GROUPS)),
)
