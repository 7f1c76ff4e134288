"""Names of SGLang that only pinning and retention use; `targets.py` lists the others. Data only."""

from __future__ import annotations

from sgl_prefix_attn.sglang_plugin.compat.targets import Target, Use, attributes_of

EVICT = Target("mem_cache.common.evict_from_tree_cache", Use.HOOK, ("tree_cache", "num_tokens"))
EVICT_IN_ALLOCATOR = Target(
    "mem_cache.allocator.base.BaseTokenToKVPoolAllocator.evict_to_free_tokens",
    Use.HOOK,
    ("self", "tree_cache", "num_tokens"),
    since="0.5.19",
)
RELEASE_KV = Target("mem_cache.common.release_kv_cache", Use.HOOK, ("req", "tree_cache"))
RUN_BATCH = Target("managers.scheduler.Scheduler.run_batch", Use.HOOK, ("self", "batch"))
FLUSH = Target("managers.scheduler.Scheduler.flush_cache", Use.HOOK, ("self",))
CLOSE_SESSION = Target("managers.scheduler.Scheduler.close_session", Use.HOOK, ("self", "recv_req"))
CREATE_TOKENIZED = Target(
    "managers.tokenizer_manager.TokenizerManager._create_tokenized_object", Use.HOOK, ("self", "obj")
)

_RADIX = "mem_cache.radix_cache.RadixCache"
_UNIFIED = "mem_cache.unified_radix_cache.UnifiedRadixCache"
_BASE = "mem_cache.base_prefix_cache"
_CORE = "mem_cache.unified_cache.unified_tree_core"

PINNING_TARGETS = (
    EVICT,
    EVICT_IN_ALLOCATOR,
    RELEASE_KV,
    RUN_BATCH,
    FLUSH,
    CLOSE_SESSION,
    CREATE_TOKENIZED,
    Target("managers.kv_hints.KvHintAction", Use.CLASS, since="0.5.23"),
    Target("managers.kv_hints.KvHintsEnvelope", Use.CLASS, since="0.5.23"),
    *attributes_of("managers.kv_hints.KvHintAction", "action_id action_type action_version payload", since="0.5.23"),
    *attributes_of("managers.kv_hints.KvHintsEnvelope", "protocol_version message_id actions", since="0.5.23"),
    *attributes_of("managers.io_struct.TokenizedGenerateReqInput", "kv_hints", since="0.5.23"),
    *attributes_of("managers.io_struct.CloseSessionReqInput", "session_id"),
    *attributes_of("managers.schedule_batch.Req", "kv_hints", since="0.5.23"),
    *attributes_of("managers.schedule_batch.Req", "session_id", since="0.5.15"),
    *attributes_of(_RADIX, "evictable_leaves is_eagle token_to_kv_pool_allocator"),
    Target(f"{_RADIX}.match_prefix", Use.CALL, ("params",)),
    Target(f"{_RADIX}.inc_lock_ref", Use.CALL, ("node",)),
    Target(f"{_RADIX}.dec_lock_ref", Use.CALL, ("node",)),
    Target(f"{_RADIX}.evictable_size", Use.CALL),
    *attributes_of("mem_cache.radix_cache.TreeNode", "lock_ref"),
    Target("mem_cache.radix_cache.RadixKey", Use.CALL, ("token_ids", "extra_key")),
    Target(f"{_UNIFIED}.match_prefix", Use.CALL, ("params",)),
    Target(f"{_UNIFIED}.inc_lock_ref", Use.CALL, ("node_id",), since="0.5.19"),
    Target(f"{_UNIFIED}.dec_lock_ref", Use.CALL, ("node_id", "params"), since="0.5.19"),
    Target(f"{_UNIFIED}.lock", Use.CALL, ("node_id",), since="0.5.22"),
    Target(f"{_UNIFIED}.unlock", Use.CALL, ("lock",), since="0.5.22"),
    Target(f"{_UNIFIED}._evict_device_leaf", Use.CALL, ("node_id", "tracker"), since="0.5.19"),
    *attributes_of(_UNIFIED, "is_write_back page_size", since="0.5.19"),
    *attributes_of(f"{_CORE}.UnifiedTreeCore", "evictable_device_leaves is_eagle", since="0.5.19"),
    *attributes_of(f"{_CORE}.UnifiedTreeNode", "component_data", since="0.5.19"),
    *attributes_of(f"{_CORE}_interface.TreePathNodeInfo", "full_value_len", since="0.5.22"),
    Target(f"{_UNIFIED}.evictable_size", Use.CALL),
    Target(f"{_UNIFIED}.supports_swa", Use.CALL),
    Target(f"{_UNIFIED}.supports_mamba", Use.CALL),
    Target(f"{_RADIX}.evict", Use.CALL, ("params",)),
    *attributes_of(_RADIX, "page_size"),
    Target(f"{_BASE}.BasePrefixCache.update_eviction_metrics", Use.CALL, ("num_evicted", "start_time")),
    Target(f"{_BASE}.EvictParams", Use.CLASS),
    *attributes_of(_BASE, "EvictParams.num_tokens IncLockRefResult.delta"),
    Target(f"{_BASE}.MatchPrefixParams.key", Use.ATTRIBUTE),
    Target(f"{_BASE}.MatchResult.last_device_node", Use.ATTRIBUTE),
    Target(f"{_BASE}.IncLockRefResult.to_dec_params", Use.CALL),
    *attributes_of("managers.schedule_policy.AddReqResult", "NO_TOKEN OTHER"),
    *attributes_of("managers.schedule_policy", "CLIP_MAX_NEW_TOKENS"),
    *attributes_of(
        "managers.schedule_policy.PrefillAdder",
        "can_run_list page_size running_batch token_to_kv_pool_allocator tree_cache",
    ),
    *attributes_of("managers.schedule_policy.SchedulePolicy", "tree_cache"),
    *attributes_of("managers.schedule_batch.Req", "extra_key origin_input_ids output_ids rid sampling_params"),
    *attributes_of("managers.scheduler.Scheduler", "tp_worker tree_cache"),
    *attributes_of("managers.scheduler_pp_mixin.SchedulerPPMixin", "mbs running_mbs"),
    *attributes_of("managers.io_struct.GetInternalStateReq", "rid"),
    *attributes_of("managers.io_struct.GetInternalStateReqOutput", "internal_state"),
    *attributes_of(
        "managers.tokenizer_manager.TokenizerManager", "lora_ref_cache lora_registry model_config tokenizer"
    ),
    *attributes_of("configs.model_config.ModelConfig", "vocab_size"),
    Target("lora.lora_registry.LoRARegistry.get_all_adapters", Use.CALL),
    *attributes_of("lora.lora_registry.LoRARef", "lora_id"),
    Target("managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop", Use.CALL),
    *attributes_of("entrypoints.http_server", "app _global_state"),
    Target("utils.auth.auth_level", Use.CALL, ("level",)),
    *attributes_of("utils.auth.AuthLevel", "ADMIN_FORCE ADMIN_OPTIONAL"),
)
