"""Names of SGLang that only wrap mode, launchers and the doctor use; `targets.py` lists the others. Data only."""

from __future__ import annotations

from sgl_prefix_attn.sglang_plugin.compat.targets import Target, Use, attributes_of

# Hooked in the process that launches schedulers.
LAUNCH_SCHEDULERS = Target(
    "entrypoints.engine.Engine._launch_scheduler_processes",
    Use.HOOK,
    ("cls", "server_args", "port_args", "run_scheduler_process_func"),
)
# Hooked there too, with --use-ray. SGLang calls it with names.
CREATE_RAY_ACTOR = Target(
    "ray.engine._create_scheduler_actor", Use.HOOK, ("pg", "bundle_idx", "gpu_id", "server_args", "port_args")
)

_TRTLLM = "layers.attention.trtllm_mha_backend"
_ARGUMENTS = "server_args.ServerArgs"
_FIELDS = "arg_groups.fields"
_BACKEND_NAMES = "attention_backend decode_attention_backend prefill_attention_backend"
_DETERMINISTIC = "enable_deterministic_inference rl_on_policy_target"

WRAP_TARGETS = (
    LAUNCH_SCHEDULERS,
    CREATE_RAY_ACTOR,
    # The stock backends that are wrapped, and the one KV pool that packed steps are known to read.
    Target("layers.attention.flashattention_backend.FlashAttentionBackend", Use.CLASS),
    Target("layers.attention.flashinfer_backend.FlashInferAttnBackend", Use.CLASS),
    Target("layers.attention.triton_backend.TritonAttnBackend", Use.CLASS),
    Target("layers.attention.torch_native_backend.TorchNativeAttnBackend", Use.CLASS),
    Target("mem_cache.memory_pool.MHATokenToKVPool", Use.CLASS),
    Target(f"{_TRTLLM}.TRTLLMHAAttnBackend", Use.CLASS),
    *attributes_of(f"{_TRTLLM}.TRTLLMHAAttnBackend", "data_type page_size"),
    Target(f"{_TRTLLM}.TRTLLMHAAttnBackend._get_bmm_scales", Use.CALL, ("layer",)),
    # Before, fp8 KV is refused.
    Target(
        f"{_TRTLLM}.TRTLLMHAAttnBackend._fused_fp8_qkv_kv_cache",
        Use.CALL,
        ("q", "k", "v", "layer", "forward_batch"),
        since="0.5.16",
    ),
    # A model whose code looks at the current backend.
    Target("models.inkling.InklingForConditionalGeneration", Use.CLASS, since="0.5.16"),
    # Arguments, as SGLang resolved them.
    Target("arg_groups.model_override_base.resolved_view", Use.CALL, ("server_args",), since="0.5.19"),
    *attributes_of(_ARGUMENTS, f"{_BACKEND_NAMES} {_DETERMINISTIC}", until="0.5.19"),
    *attributes_of(_ARGUMENTS, "page_size", until="0.5.19"),
    *attributes_of(f"{_FIELDS}.schedule.Schedule", "page_size", since="0.5.20"),
    *attributes_of(_ARGUMENTS, "enable_page_major_kv_layout enable_unified_memory", since="0.5.15", until="0.5.19"),
    *attributes_of(f"{_FIELDS}.exec_.ExecKernel", _BACKEND_NAMES, since="0.5.20"),
    *attributes_of(f"{_FIELDS}.exec_.ExecKernel", "enable_amd_monokernel enable_nvidia_megakernel", since="0.5.23"),
    *attributes_of(f"{_FIELDS}.exec_.ExecDeterministic", _DETERMINISTIC, since="0.5.20"),
    *attributes_of(f"{_FIELDS}.memory.Memory", "enable_unified_memory", since="0.5.20"),
    # Slots that are not those of the request table.
    *attributes_of("model_executor.model_runner.ModelRunner", "kv_index_translator", since="0.5.19"),
    *attributes_of("mem_cache.kv_index_translator.KVIndexTranslator", "is_translating", since="0.5.19"),
    # The doctor: a runner from arguments and configuration.
    Target("configs.model_config.AttentionArch", Use.CLASS),
    *attributes_of("configs.model_config.AttentionArch", "MLA"),
    Target("configs.model_config.ModelConfig.from_server_args", Use.CALL, ("server_args",)),
    Target("configs.model_config.ModelConfig.get_num_attention_heads", Use.CALL, ("tensor_parallel_size",)),
    Target("configs.model_config.ModelConfig.get_num_kv_heads", Use.CALL, ("tensor_parallel_size",)),
    *attributes_of(
        "configs.model_config.ModelConfig",
        "attention_arch dtype head_dim hf_text_config is_generation is_hybrid_swa is_multimodal num_hidden_layers "
        "sliding_window_size v_head_dim",
    ),
    *attributes_of("configs.qwen3_next.Qwen3NextConfig", "full_attention_layer_ids"),
    Target("speculative.spec_info.SpeculativeAlgorithm.from_string", Use.CALL, ("name",)),
    Target("models.registry.ModelRegistry", Use.ATTRIBUTE),
    Target("server_args.ServerArgs.resolve_once", Use.CALL, since="0.5.20"),
)
