"""Every name of SGLang that this package hooks, calls, subclasses or reads: one table, data only, no SGLang import.

The table is the contract with SGLang. `tests/sglang_plugin/compat/test_contract.py` checks it by `ast` in every
supported wheel. Code that uses another name of SGLang adds it here; code that stops using one removes it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Every published version that is supported, oldest first.
SUPPORTED_VERSIONS = (
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)


class Use(enum.Enum):
    """How the package uses a target, which decides what the contract test checks."""

    HOOK = "hook"  # wrapped through HookRegistry: its first parameters are `parameters`, in this order
    CALL = "call"  # called by us: it takes `parameters`, by these names, and requires no others
    CLASS = "class"  # a class we derive from or compare with
    ATTRIBUTE = "attribute"  # a module variable, or an attribute or property that we read or set on objects


@dataclass(frozen=True)
class Target:
    """One name of SGLang: `path` is dotted, as HookRegistry takes it, and stands below `sglang.srt`.

    `since` and `until` bound the versions in which the name exists and is used; both belong to the range. Without
    `until` the newest supported version has the name too.
    """

    name: str
    use: Use
    parameters: tuple[str, ...] = ()
    since: str = SUPPORTED_VERSIONS[0]
    until: str | None = None

    @property
    def path(self) -> str:
        """The full dotted path."""
        return f"sglang.srt.{self.name}"

    @property
    def versions(self) -> tuple[str, ...]:
        """The supported versions that must have the target."""
        end = len(SUPPORTED_VERSIONS) if self.until is None else SUPPORTED_VERSIONS.index(self.until) + 1
        return SUPPORTED_VERSIONS[SUPPORTED_VERSIONS.index(self.since) : end]


def attributes_of(
    owner: str, names: str, since: str = SUPPORTED_VERSIONS[0], until: str | None = None
) -> tuple[Target, ...]:
    """A target for each of the attributes of `owner`; names: separated by spaces."""
    return tuple(Target(f"{owner}.{name}", Use.ATTRIBUTE, since=since, until=until) for name in names.split())


# Hooks.
FORWARD_BATCH_INIT = Target(
    "model_executor.forward_batch_info.ForwardBatch.init_new", Use.HOOK, ("cls", "batch", "model_runner")
)
MODEL_RUNNER_FORWARD = Target("model_executor.model_runner.ModelRunner.forward", Use.HOOK, ("self", "forward_batch"))
SUPPORT_TRITON = Target("utils.common.support_triton", Use.HOOK, ("backend",))
INTERNAL_STATE = Target("managers.scheduler.Scheduler.get_internal_state", Use.HOOK, ("self", "recv_req"))
ON_IDLE = Target("managers.scheduler.Scheduler.on_idle", Use.HOOK, ("self",))
RESUME_MEMORY = Target(
    "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.resume_memory_occupation",
    Use.HOOK,
    ("self", "recv_req"),
)
CALC_PRIORITY = Target("managers.schedule_policy.SchedulePolicy.calc_priority", Use.HOOK, ("self", "waiting_queue"))
ADD_ONE_REQ = Target("managers.schedule_policy.PrefillAdder.add_one_req", Use.HOOK, ("self", "req"))
_LAST_LOC_PARAMETERS = ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor")
GET_LAST_LOC_EARLY = Target("mem_cache.common.get_last_loc", Use.HOOK, _LAST_LOC_PARAMETERS, until="0.5.15.post1")
GET_LAST_LOC = Target("mem_cache.allocation.get_last_loc", Use.HOOK, _LAST_LOC_PARAMETERS, since="0.5.16")
# Decode graphs for either route. Not hooked on a CPU or with a fixed route.
_GRAPH_RUNNER = "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
CAPTURE_ONE_SHAPE = Target(f"{_GRAPH_RUNNER}.capture_one_shape", Use.HOOK, ("self", "size", "forward"))
MAKE_GRAPH_KEY = Target(f"{_GRAPH_RUNNER}._make_graph_key", Use.HOOK, ("self",))
# SGLang calls it outside of ModelRunner.forward for the verify steps of EAGLE, STANDALONE and DFLASH.
LOAD_BATCH = Target(f"{_GRAPH_RUNNER}.load_batch", Use.HOOK, ("self", "forward_batch"))
# Hooked for this model over the Triton backend only.
PREPARE_ATTN_MASKS = Target(
    "models.gemma3_mm.Gemma3ForConditionalGeneration.prepare_attn_masks",
    Use.HOOK,
    ("self", "forward_batch", "input_ids", "mask_dtype"),
)
HOOKS = (
    FORWARD_BATCH_INIT,
    MODEL_RUNNER_FORWARD,
    SUPPORT_TRITON,
    INTERNAL_STATE,
    ON_IDLE,
    RESUME_MEMORY,
    CALC_PRIORITY,
    ADD_ONE_REQ,
    GET_LAST_LOC_EARLY,
    GET_LAST_LOC,
    CAPTURE_ONE_SHAPE,
    MAKE_GRAPH_KEY,
    LOAD_BATCH,
    PREPARE_ATTN_MASKS,
)

ATTENTION_BACKEND = Target("layers.attention.base_attn_backend.AttentionBackend", Use.CLASS)

# Members of ATTENTION_BACKEND that PrefixPackBackend delegates to the stock backend, each after a review that the stock
# backend's answer is right for ours. A member that is neither defined nor listed fails the contract test.
DELEGATED_MEMBERS = frozenset(
    {
        "attn_backend_list",
        "data_type",
        "decode_attention_backend_str",
        "dllm_attention",
        "draft_extend_metadata_captured_in_graph",
        "extend_dummy_seqs_capped_by_req_pool",
        "folds_encoder_swa_replay",
        "forward_mixed",
        "get_cuda_graph_seq_len_fill_value",
        "get_fused_kv_write_buffers",
        "get_indexer_metadata",
        "get_verify_buffers_to_fill_after_draft",
        "glue_draft_metadata",
        "glue_target_verify_metadata",
        "kv_cache_dtype",
        "kv_index_translator",
        "late_layer_num_tokens",
        "prefer_eager_mixed_prefill_under_dp_attention",
        "prefill_attention_backend_str",
        "prefill_cuda_graph_default_max_seq_len",
        "prefill_cuda_graph_max_batch_size",
        "prepare_full_cuda_graph_chunked_prefix",
        "prepare_prefill_shared_read_snapshot",
        "resolve_prefill_shared_read_ends",
        "skips_prefill_metadata_on_idle_dp_rank",
        "support_triton",
        "supports_draft_extend_metadata_staging",
        "supports_full_cuda_graph_chunked_prefix",
        "supports_prefill_cuda_graph_max_context_size",
        "supports_ragged_verify_graph",
        "update_verify_buffers_to_fill_after_draft",
        "use_captured_forward_metadata_for_breakable_cuda_graph",
        "validate_elastic_cuda_graph_recapture",
        "verify_mask",
    }
)

# Registration.
_REGISTRATION = (
    Target("plugins.hook_registry.HookRegistry.register", Use.CALL, ("target", "hook", "hook_type")),
    Target("plugins.hook_registry.HookRegistry.apply_hooks", Use.CALL),
    *attributes_of("plugins.hook_registry.HookType", "AFTER AROUND"),
    Target("layers.attention.attention_registry.register_attention_backend", Use.CALL, ("name",)),
    Target("layers.attention.attention_registry.ATTENTION_BACKENDS", Use.ATTRIBUTE),
    Target("server_args.add_attention_backend_choices", Use.CALL, ("choices",)),
    Target("server_args.ATTENTION_BACKEND_CHOICES", Use.ATTRIBUTE),
)

# Backends and layers.
_BASE = "layers.attention.base_attn_backend"
_BACKEND = f"{_BASE}.AttentionBackend"
_RUNNER = "model_executor.model_runner.ModelRunner"
_BACKENDS = (
    ATTENTION_BACKEND,
    Target(f"{_BACKEND}.init_forward_metadata", Use.CALL, ("forward_batch",)),
    Target(f"{_BACKEND}.init_forward_metadata_out_graph", Use.CALL, ("forward_batch", "in_capture")),
    *(
        Target(f"{_BACKEND}.{name}", Use.CALL, ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"))
        for name in ("forward", "forward_decode", "forward_extend")
    ),
    Target(f"{_BACKEND}.init_forward_metadata_in_graph", Use.CALL, ("forward_batch",)),
    Target(f"{_BACKEND}.init_cuda_graph_state", Use.CALL, ("max_bs", "max_num_tokens")),
    Target(f"{_BACKEND}.on_after_cuda_graph_warmup", Use.CALL),
    Target(f"{_BACKEND}.init_forward_metadata_for_breakable_cuda_graph_capture", Use.CALL, ("forward_batch",)),
    Target(
        f"{_BACKEND}.prepare_forward_metadata_for_breakable_cuda_graph_replay",
        Use.CALL,
        ("capture_metadata", "forward_batch"),
    ),
    Target(f"{_BACKEND}.shared_read_ends", Use.CALL, ("fm",), since="0.5.18"),
    *attributes_of(f"{_BASE}.SharedReadEnds", "PRE_REPLAY", since="0.5.18"),
    *attributes_of(_BACKEND, "needs_cpu_seq_lens"),
    *attributes_of(
        _RUNNER,
        "device dtype is_draft_worker kv_cache_dtype model model_config req_to_token_pool server_args spec_algorithm "
        "token_to_kv_pool use_mla_backend",
    ),
    *attributes_of("configs.model_config.ModelConfig", "hf_config is_encoder_decoder is_generation"),
    *attributes_of("configs.model_config.ModelConfig", "model_is_mrope", since="0.5.16"),
    *attributes_of(_RUNNER, "model_is_mrope", until="0.5.15.post1"),
    Target("configs.model_config.is_minimax_sparse", Use.CALL, ("config",)),
    *attributes_of(_RUNNER, "draft_attention_backend", since="0.5.18"),
    Target("model_executor.forward_context.forward_context", Use.CALL, ("ctx",)),
    Target("model_executor.forward_context.get_forward_context", Use.CALL),
    *attributes_of("model_executor.forward_context.ForwardContext", "attn_backend"),
    Target("layers.radix_attention.AttentionType", Use.CLASS),
    Target("layers.radix_attention.RadixAttention", Use.CLASS),
    *attributes_of(
        "layers.radix_attention.RadixAttention",
        "attn_type is_cross_attention k_scale k_scale_float layer_id logit_cap logit_capping_method pos_encoding_mode "
        "qk_head_dim scaling sliding_window_size tp_k_head_num tp_q_head_num tp_v_head_num use_irope v_head_dim "
        "v_scale v_scale_float xai_temperature_len",
    ),
)

# Decode graphs.
_GRAPHS = (
    *attributes_of(_GRAPH_RUNNER, "attn_backend capture_forward_mode enable_profile_cuda_graph"),
    *attributes_of("model_executor.runner.shape_key.ShapeKey", "size variant_label"),
    *attributes_of("layers.attention.hybrid_attn_backend.HybridAttnBackend", "decode_backend"),
    *attributes_of("layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend", "full_attn_backend"),
    *attributes_of("layers.attention.flashinfer_backend.FlashInferAttnBackend", "decode_use_tensor_cores"),
)

# KV pool.
_MHA_POOL = "mem_cache.memory_pool.MHATokenToKVPool"
_POOLS = (
    Target(f"{_MHA_POOL}.get_key_buffer", Use.CALL, ("layer_id",)),
    Target(f"{_MHA_POOL}.get_value_buffer", Use.CALL, ("layer_id",)),
    Target(f"{_MHA_POOL}.set_kv_buffer", Use.CALL, ("layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale")),
    *attributes_of(_MHA_POOL, "is_quantized_kv_cache", since="0.5.16"),
    *attributes_of("mem_cache.memory_pool.MHATokenToKVPoolFP4", "k_scale_buffer"),
    *attributes_of("mem_cache.memory_pool.MHATokenToKVPoolMXFP8", "k_scale_buffer", since="0.5.16"),
    *attributes_of("mem_cache.memory_pool.HybridLinearKVPool", "full_kv_pool"),
    Target("mem_cache.memory_pool.ReqToTokenPool.req_to_token", Use.ATTRIBUTE),
    Target("mem_cache.memory_pool.HybridReqToTokenPool", Use.CLASS),
    *attributes_of("mem_cache.swa_memory_pool.SWAKVPool", "full_kv_pool layers_mapping"),
    # The window layers' slots are of no use to a write in a full layer, so a bare location is enough.
    Target("mem_cache.memory_pool.unwrap_write_loc", Use.CALL, ("loc_info",)),
    *attributes_of(_MHA_POOL, "kv_cache_layout"),
    *attributes_of(_MHA_POOL, "use_hnd", since="0.5.15"),
    *attributes_of("mem_cache.memory_pool.MiniMaxSparseKVPool", "main_pool", since="0.5.15"),
    *attributes_of("mem_cache.kv_index_translator.KVIndexTranslator", "is_translating", since="0.5.19"),
    Target("model_executor.model_runner.ModelRunner.kv_index_translator", Use.ATTRIBUTE, since="0.5.19"),
    Target("managers.io_struct.ResumeMemoryOccupationReqInput.tags", Use.ATTRIBUTE),
)

# Batches and requests.
_BATCHES = (
    *attributes_of(
        "managers.schedule_batch.ScheduleBatch",
        "decoding_reqs dllm_config encoder_lens extend_lens forward_mode global_num_tokens input_embeds "
        "is_prefill_only multimodal_inputs prefix_lens replace_embeds req_pool_indices reqs return_hidden_states "
        "return_logprob seq_lens seq_lens_cpu spec_algorithm tree_cache",
    ),
    *attributes_of("managers.schedule_batch.Req", "finished_reason last_node"),
    *attributes_of("managers.schedule_batch.Req", "beam_group", since="0.5.19"),
    *attributes_of("managers.schedule_batch.Req", "kv_committed_len", until="0.5.18"),
    *attributes_of("managers.schedule_batch.ReqKvInfo", "kv_committed_len", since="0.5.19"),
    *attributes_of("managers.scheduler.Scheduler", "last_batch running_batch"),
    *attributes_of("managers.scheduler_pp_mixin.SchedulerPPMixin", "mbs running_mbs"),
    *attributes_of(
        "model_executor.forward_batch_info.ForwardBatch",
        "batch_size encoder_lens extend_input_logprob_token_ids_gpu extend_logprob_start_lens_cpu extend_num_tokens "
        "extend_prefix_lens extend_prefix_lens_cpu extend_seq_lens extend_seq_lens_cpu extend_start_loc forward_mode "
        "multi_item_delimiter_indices out_cache_loc req_pool_indices seq_lens seq_lens_cpu spec_info "
        "tbo_parent_token_range",
    ),
    Target("model_executor.forward_batch_info.ForwardMode.is_idle", Use.CALL),
    Target("model_executor.forward_batch_info.ForwardMode.is_decode", Use.CALL),
    *attributes_of("model_executor.forward_batch_info.ForwardMode", "DECODE EXTEND MIXED"),
    Target("speculative.spec_info.SpeculativeAlgorithm.is_none", Use.CALL),
    Target("managers.io_struct.GetInternalStateReqOutput.internal_state", Use.ATTRIBUTE),
)

# Admission of waiting requests.
_POLICY = "managers.schedule_policy"
_ADMISSION = (
    *attributes_of(f"{_POLICY}.SchedulePolicy", "enable_priority_scheduling policy"),
    *attributes_of(f"{_POLICY}.CacheAgnosticPolicy", "FCFS"),
    *attributes_of(f"{_POLICY}.AddReqResult", "CONTINUE OTHER"),
    *attributes_of(f"{_POLICY}.PrefillAdder", "can_run_list new_token_ratio page_size rem_total_tokens running_batch"),
    Target("managers.schedule_batch.ScheduleBatch.is_empty", Use.CALL),
    Target("managers.schedule_batch.Req.finished", Use.CALL),
    *attributes_of("managers.schedule_batch.Req", "origin_input_ids output_ids sampling_params"),
    *attributes_of("managers.schedule_batch.Req", "extra_key input_embeds last_node logprob_start_len return_logprob"),
    *attributes_of("managers.schedule_batch.Req", "prefix_indices", until="0.5.21"),
    *attributes_of("managers.schedule_batch.Req", "prefix_len", since="0.5.22"),
    *attributes_of("sampling.sampling_params.SamplingParams", "custom_params max_new_tokens"),
)

# Prefix caches. Requests hold node objects up to 0.5.18, ids of the unified cache from 0.5.19 on.
_TREE = "mem_cache.unified_radix_cache.UnifiedRadixCache"
_CORE = "mem_cache.unified_cache.unified_tree_core"
_CORE_INTERFACE = "mem_cache.unified_cache.unified_tree_core_interface"
_TREES = (
    *attributes_of("mem_cache.radix_cache.RadixCache", "disable root_node"),
    *attributes_of("mem_cache.radix_cache.TreeNode", "children id key parent"),
    *attributes_of(_TREE, "disable"),
    *attributes_of(_TREE, "tree_core", since="0.5.19"),
    Target(f"{_CORE}.UnifiedTreeCore.node_by_id", Use.CALL, ("node_id",), since="0.5.19"),
    Target(f"{_CORE}.UnifiedTreeCore.root_node_handle", Use.CALL, ("extra_key",), since="0.5.19"),
    *attributes_of(f"{_CORE}.UnifiedTreeCore", "root_node", since="0.5.19"),
    *attributes_of(f"{_CORE}.UnifiedTreeNode", "children id key parent", since="0.5.19"),
    Target(
        f"{_CORE_INTERFACE}.UnifiedTreeCoreInterface.collect_path_info", Use.CALL, ("end_node_ids",), since="0.5.22"
    ),
    *attributes_of(f"{_CORE_INTERFACE}.TreePathNodeInfo", "node_id parent_id path_end path_start", since="0.5.22"),
    *attributes_of(f"{_CORE_INTERFACE}.TreePathNodeInfo", "num_children", since="0.5.23"),
    *attributes_of(
        "environ.Envs",
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND",
        since="0.5.19",
    ),
    *attributes_of("environ.Envs", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", until="0.5.20"),
    Target("environ.envs", Use.ATTRIBUTE),
    Target(f"{_CORE_INTERFACE}.UnifiedTreeCoreInterface", Use.CLASS, since="0.5.19"),
    Target("mem_cache.chunk_cache.ChunkCache", Use.CLASS, until="0.5.21"),
    *attributes_of("session.streaming_session.StreamingSession", "inner", until="0.5.21"),
)

# Server arguments: attributes of one class up to 0.5.19, then fields of several that SGLang assembles.
_FIELDS = "arg_groups.fields"
_ARGUMENTS = (
    Target("server_args.get_global_server_args", Use.CALL),
    Target("runtime_context.get_server_args", Use.CALL, since="0.5.15"),
    Target("runtime_context.get_parallel", Use.CALL),
    *attributes_of(
        "server_args.ServerArgs",
        "admin_api_key api_key attn_cp_size chunked_prefill_size device disable_radix_cache disaggregation_mode "
        "dllm_algorithm dp_size enable_dp_attention enable_hierarchical_cache enable_hisparse enable_lmcache "
        "enable_lora enable_metrics enable_metrics_for_all_schedulers enable_pdmux enable_two_batch_overlap "
        "extra_metric_labels "
        "model_path pp_async_batch_depth pp_size radix_cache_backend served_model_name speculative_algorithm tp_size",
        until="0.5.19",
    ),
    *attributes_of("server_args.ServerArgs", "dcp_size", since="0.5.15", until="0.5.19"),
    *attributes_of("server_args.ServerArgs", "enable_flexkv", since="0.5.16", until="0.5.19"),
    *attributes_of("server_args.ServerArgs", "speculative_draft_attention_backend", until="0.5.17"),
    Target("server_args.ServerArgs.override", Use.CALL, ("source",), since="0.5.16", until="0.5.17"),
    *attributes_of(f"{_FIELDS}.device.Device", "device", since="0.5.20"),
    *attributes_of(f"{_FIELDS}.serving.Serving", "admin_api_key api_key", since="0.5.20"),
    *attributes_of(
        f"{_FIELDS}.parallel.Parallel",
        "attn_cp_size dcp_size dp_size enable_dp_attention pp_async_batch_depth pp_size tp_size",
        since="0.5.20",
    ),
    *attributes_of(f"{_FIELDS}.parallel.Parallel", "attn_dp_size", since="0.5.22"),
    *attributes_of(f"{_FIELDS}.disagg.Disagg", "disaggregation_mode enable_pdmux", since="0.5.20"),
    *attributes_of(f"{_FIELDS}.exec_.ExecOverlap", "enable_two_batch_overlap", since="0.5.20"),
    *attributes_of(f"{_FIELDS}.exec_.ExecDllm", "dllm_algorithm", since="0.5.20"),
    *attributes_of(f"{_FIELDS}.lora.Lora", "enable_lora", since="0.5.20"),
    *attributes_of(
        f"{_FIELDS}.memory.Memory",
        "disable_radix_cache enable_flexkv enable_hierarchical_cache enable_hisparse enable_lmcache "
        "enable_unified_cache_external_linker radix_cache_backend",
        since="0.5.20",
    ),
    *attributes_of(f"{_FIELDS}.spec.Spec", "speculative_algorithm", since="0.5.20"),
    *attributes_of(f"{_FIELDS}.model.Model", "model_path", since="0.5.20"),
    *attributes_of(
        f"{_FIELDS}.observability.Observability",
        "enable_metrics enable_metrics_for_all_schedulers extra_metric_labels",
        since="0.5.20",
    ),
    *attributes_of(f"{_FIELDS}.schedule.Schedule", "chunked_prefill_size", since="0.5.20"),
    *attributes_of(f"{_FIELDS}.serving.Serving", "served_model_name", since="0.5.20"),
    Target(
        "server_args.ServerArgs._get_default_attn_backend",
        Use.CALL,
        ("use_mla_backend", "model_config"),
        until="0.5.18",
    ),
    Target(
        "arg_groups.model_override_base.get_default_attn_backend",
        Use.CALL,
        ("server_args", "use_mla_backend", "model_config"),
        since="0.5.19",
    ),
)

TARGETS = (
    *HOOKS,
    *_REGISTRATION,
    *_BACKENDS,
    *_GRAPHS,
    *_POOLS,
    *_BATCHES,
    *_ADMISSION,
    *_TREES,
    *_ARGUMENTS,
)
