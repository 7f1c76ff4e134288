"""Names of SGLang that layouts rely on: HiCache, disaggregated decode, data parallel attention. See docs/models.md."""

from __future__ import annotations

from sgl_prefix_attn.sglang_plugin.compat.targets import Target, Use, attributes_of

LAYOUT_TARGETS = (
    # The trees of HiCache are the same, and a request locks a node on the device.
    Target("mem_cache.hiradix_cache.HiRadixCache", Use.CLASS, until="0.5.20"),
    *attributes_of("mem_cache.hiradix_cache.HiRadixCache", "disable root_node", until="0.5.20"),
    Target("mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache", Use.CALL, ("server_args", "params")),
    *attributes_of("mem_cache.base_prefix_cache.MatchResult", "last_device_node"),
    # With its radix option, disaggregated decode matches and locks as an ordinary server does.
    Target("disaggregation.decode.DecodePreallocQueue._match_prefix_and_lock", Use.CALL, ("req",)),
    *attributes_of("server_args.ServerArgs", "disaggregation_decode_enable_radix_cache", until="0.5.19"),
    *attributes_of("arg_groups.fields.disagg.Disagg", "disaggregation_decode_enable_radix_cache", since="0.5.20"),
    # Each rank of data parallel attention has a scheduler and a tree of its own; a request may name its rank.
    Target("managers.data_parallel_controller.DataParallelController", Use.CLASS),
    *attributes_of("managers.io_struct.GenerateReqInput", "routed_dp_rank"),
)
