"""The facts of a server that has not been started, from its arguments and its model's configuration.

The checks that a server makes at its start read them, so there is no second list of checks. Layers and KV pool
are SGLang's own classes, filled with what the model's configuration says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sgl_prefix_attn.sglang_plugin.compat.server_facts import ServerFacts, resolved
from sgl_prefix_attn.sglang_plugin.doctor.model_source import attention_type, knows_attention_groups

# --kv-cache-dtype: the type of the buffers; others are kept with scales for each token or block.
_KV_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class LayerKind:
    """Attention layers of a model that have the same shape.

    Attributes:
        name: for the report.
        layers: their ids.
        head_dim, v_head_dim: head sizes of K and V.
        kv_heads: KV heads of the pool on one rank.
        window: tokens that a query sees, None for all.
    """

    name: str
    layers: tuple[int, ...]
    head_dim: int
    v_head_dim: int
    kv_heads: int
    window: int | None


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedServer(ServerFacts):
    """Facts of a server that does not run, with layers and a KV pool without memory.

    Attributes:
        layer_kinds: the kinds of attention layers, with the KV heads that the pool has of them.
        heads_of_all_ranks: whether the model's code spreads its heads over other ranks than the KV pool does.
    """

    layer_kinds: list[LayerKind]
    heads_of_all_ranks: bool


def planned_server(server_args: Any) -> PlannedServer:
    """The facts of a server's target model on one rank.

    Args:
        server_args: SGLang's ServerArgs, resolved.

    Raises:
        OSError, ValueError: the model's configuration cannot be read.
    """
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    config, arguments = ModelConfig.from_server_args(server_args), resolved(server_args)
    asked = str(arguments.kv_cache_dtype or "auto")
    facts = ServerFacts.read(
        config,
        server_args=server_args,
        arguments=arguments,
        model_config=config,
        device=str(arguments.device or "cuda"),
        kv_cache_dtype=config.dtype if asked == "auto" else _KV_DTYPES.get(asked),
        spec_algorithm=SpeculativeAlgorithm.from_string(arguments.speculative_algorithm),
        use_mla_backend=config.attention_arch == AttentionArch.MLA,
    )
    ranks = _ranks_of_heads(facts)
    kinds, of_model = (
        [] if facts.use_mla_backend else list(_layer_kinds(config, n)) for n in (facts.attention_ranks, ranks)
    )
    pool, model = _pool(facts, kinds), _model(facts, of_model, ranks)
    of_all = ranks != facts.attention_ranks
    return PlannedServer.read(facts, token_to_kv_pool=pool, model=model, layer_kinds=kinds, heads_of_all_ranks=of_all)


def _ranks_of_heads(facts: ServerFacts) -> int:
    """Ranks over which the model's code spreads its attention heads."""
    ranks = facts.attention_ranks
    all_ranks = facts.argument("tp_size") or 1
    return ranks if ranks == all_ranks or knows_attention_groups(_model_class(facts)) else all_ranks


def _model_class(facts: ServerFacts) -> type:
    from sglang.srt.models.registry import ModelRegistry

    model_class: type = ModelRegistry.resolve_model_cls(facts.architectures)[0]
    return model_class


def _attention_type(facts: ServerFacts) -> str:
    try:
        return attention_type(_model_class(facts))
    except ValueError:  # not SGLang's: it may run the code of Transformers
        return "DECODER"


def _layer_kinds(config: Any, ranks: int) -> Iterator[LayerKind]:
    """The kinds of attention layers that the configuration names. Linear attention and state layers are left out."""
    window = getattr(config, "sliding_window_size", None)
    full: Any = None
    if getattr(config, "is_hybrid_swa", False):
        swa = tuple(getattr(config, "swa_attention_layer_ids", None) or ())
        full = tuple(getattr(config, "full_attention_layer_ids", None) or ())
        heads = config.get_swa_num_kv_heads(ranks) if hasattr(config, "get_swa_num_kv_heads") else None
        heads = heads or config.get_num_kv_heads(ranks)
        head_dim, v_head_dim = (getattr(config, f"swa_{n}", None) or getattr(config, n) for n in _HEADS)
        yield LayerKind("sliding window with KV slots of its own", swa, head_dim, v_head_dim, heads, window or -1)
    else:
        types = getattr(config.hf_text_config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        swa = tuple(index for index, name in enumerate(types) if name == "sliding_attention")
        full = getattr(config.hf_text_config, "full_attention_layer_ids", None)  # of models with linear layers
        if full is None:
            full = (index for index, name in enumerate(types) if name not in ("sliding_attention", *_NO_ATTENTION))
        full = tuple(full)
        if swa:
            heads = config.get_num_kv_heads(ranks)
            yield LayerKind("sliding window", swa, config.head_dim, config.v_head_dim, heads, window)
    if full:
        heads = config.get_num_kv_heads(ranks)
        yield LayerKind("full attention", full, config.head_dim, config.v_head_dim, heads, None)


_HEADS = ("head_dim", "v_head_dim")
_NO_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent")


def _pool(facts: ServerFacts, layer_kinds: list[LayerKind]) -> Any:
    """A KV pool of SGLang's class without memory: one page of each layer."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    hnd_switch = getattr(envs, "SGLANG_USE_HND_KVCACHE", None)
    hnd = hnd_switch is not None and bool(hnd_switch.get())
    page_major = facts.argument("enable_page_major_kv_layout")  # 0.5.15 to 0.5.19; later in unified memory
    kinds = {layer: kind for kind in layer_kinds for layer in kind.layers}

    def buffer(layer: int, size: str) -> torch.Tensor:
        shape = [facts.page_size, kinds[layer].kv_heads, getattr(kinds[layer], size)]
        return torch.empty(shape[:2] + [1] * hnd + shape[2:], dtype=facts.kv_cache_dtype)

    buffers = {
        "get_key_buffer": lambda self, layer: buffer(layer, "head_dim"),
        "get_value_buffer": lambda self, layer: buffer(layer, "v_head_dim"),
    }
    plain = _without_memory(
        MHATokenToKVPool,
        **buffers,
        use_hnd=hnd,
        kv_cache_layout="page_major" if page_major else "hnd" if hnd else "nhd",
        is_quantized_kv_cache=facts.kv_cache_dtype is None,
    )
    if not getattr(facts.model_config, "is_hybrid_swa", False):
        return plain
    mapping = {layer: (layer, kind.window is not None) for layer, kind in kinds.items()}
    return _without_memory(SWAKVPool, **buffers, full_kv_pool=plain, layers_mapping=mapping)


def _without_memory(kind: type, **members: Any) -> Any:
    """An object of a pool's class, by its name and by `isinstance`, whose constructor did not run."""
    made: Any = type(kind.__name__, (kind,), members)
    return made.__new__(made)


def _model(facts: ServerFacts, kinds: list[LayerKind], ranks: int) -> torch.nn.Module:
    """A module with the attention layers of the model, and with its method for image masks if it has one."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    config, kind_of_layers = facts.model_config, AttentionType[_attention_type(facts)]
    cap = getattr(config.hf_text_config, "attn_logit_softcapping", None) or 0.0
    model = torch.nn.ModuleList(
        RadixAttention(
            config.get_num_attention_heads(ranks),
            kind.head_dim,
            kind.head_dim**-0.5,
            kind.kv_heads,
            layer,
            logit_cap=cap,
            v_head_dim=kind.v_head_dim,
            sliding_window_size=-1 if kind.window is None else kind.window,
            attn_type=kind_of_layers,
        )
        for kind in kinds
        for layer in kind.layers
    )
    if getattr(config, "is_multimodal", False) and hasattr(_model_class(facts), "prepare_attn_masks"):
        vars(model)["prepare_attn_masks"] = None
    return model
