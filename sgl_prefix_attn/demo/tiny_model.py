"""Random-weight models of a few megabytes on which attention still decides the next token.

SGLang's own dummy weights are so small that a model made of them ignores its context and alternates between two
tokens; a wrong attention kernel would go unnoticed. With weights of standard deviation 0.1, one key left out of 400
changes about every tenth greedy token. Larger weights make attention so sharp that fewer keys matter, and amplify
rounding: fp32 errors of the difference between the two best logits are then nearer to that difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

CONTEXT_LENGTH = 8192
VOCABULARY = 1024
RESERVED_TOKENS = 10  # ids below it are kept out of prompts: padding, begin and end of sequence
# The one of the first few seeds with which greedy decoding of the shipped workloads meets the fewest near ties:
# among 18,000 tokens no two best logits are nearer than 7e-5, where rounding in fp32 moves their difference by 4e-6.
_SEED = 4
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Gemma 2 brings layers with a sliding window. Its soft cap of the attention logits is set out of reach, because
# SGLang's torch_native backend ignores it, so that on a CPU there would be nothing to compare with.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    # The head size that all kernels of a GPU have, those of the stock backends too.
    "llama_gpu": ("LlamaForCausalLM", {"head_dim": 128, "num_attention_heads": 4}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "sliding_window": 64,
            "attn_logit_softcapping": 1e4,
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": None,
            "hidden_act": "gelu_pytorch_tanh",  # as SGLang calls transformers' hidden_activation
            "tie_word_embeddings": True,
        },
    ),
    # Cohere 2 with the keys that make SGLang keep window layers in a KV pool of their own.
    "cohere2": (
        "Cohere2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "is_hybrid_swa": True,
            "hybrid_layer_pattern": [1, 0, 1, 0],
            "tie_word_embeddings": True,
        },
    ),
    # Multi-head latent attention, without experts: all layers are dense.
    "deepseek": (
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 2,
            "moe_layer_freq": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            # SGLang's CPU engine knows no other position encoding for this model.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": CONTEXT_LENGTH // 2,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}
# The head sizes that kernels of a GPU have for MLA.
_VARIANTS["deepseek_gpu"] = (
    _VARIANTS["deepseek"][0],
    {
        **_VARIANTS["deepseek"][1],
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
)
# Kinds of layers beside full attention, and experts, with the head sizes that kernels of a GPU have.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_VARIANTS |= {
    "qwen3_moe_gpu": ("Qwen3MoeForCausalLM", {"head_dim": 128, "num_attention_heads": 4, **_EXPERTS}),
    # Window layers, and sinks in all layers. SGLang runs it in the type that its configuration names.
    "gpt_oss_gpu": (
        "GptOssForCausalLM",
        {
            "dtype": "bfloat16",
            "num_hidden_layers": 4,
            "head_dim": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "swiglu_limit": 7.0,
        },
    ),
    # Chunked attention in three layers of four. Without a vision model, SGLang reads no experts and pairs the
    # dimensions of rotary embeddings otherwise than transformers.
    "llama4_gpu": (
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 128,
            "num_attention_heads": 4,
            "intermediate_size_mlp": 512,
            "interleave_moe_layer_step": 8,
            "attention_chunk_size": 128,
        },
    ),
    # Linear attention in three layers of four.
    "qwen3_next_gpu": (
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "head_dim": 128,
            "num_attention_heads": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "shared_expert_intermediate_size": 128,
            **_EXPERTS,
        },
    ),
}
VARIANTS = tuple(_VARIANTS)
# Gemma 2 normalises what each layer adds. At the initial weights, with tied embeddings, that would be too little to
# outweigh the input: the model would repeat its last token.
_BRANCH_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
_GEMMA_BRANCH_WEIGHT = 9.0
# Initial sinks of GPT-OSS are near 0, where a kernel that ignores them goes unnoticed among some hundred keys. Its
# experts magnify rounding in 16 bits, so they are made smaller.
_SINK_SCALE, _SINK_OFFSET, _EXPERT_SCALE = 4.0, 5.0, 0.1
_GPT_OSS = "GptOssForCausalLM"
_WEIGHTS = {_GPT_OSS: (_SINK_SCALE, _SINK_OFFSET, _EXPERT_SCALE)}  # what a model's name depends on


def tiny_model(variant: str = "llama", *, cache: Path | None = None) -> Path:
    """Folder of the tiny model called `variant` (one of VARIANTS), written on first use.

    `cache` is the folder models are kept in; by default one below the user's cache folder (XDG_CACHE_HOME). Raises
    ValueError for an unknown variant.
    """
    if variant not in _VARIANTS:
        raise ValueError(f"no tiny model variant {variant!r}; there are {', '.join(VARIANTS)}")
    architecture, extra = _VARIANTS[variant]
    recipe = json.dumps(
        [architecture, _SHAPE, extra, _SEED, *_WEIGHTS.get(architecture, (_GEMMA_BRANCH_WEIGHT,))], sort_keys=True
    )
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sgl-prefix-attn"
    folder = root / f"tiny-{variant}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=root, prefix=".unfinished-"))
        try:
            _write(architecture, {**_SHAPE, **extra}, scratch)
            _publish(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write(architecture: str, values: dict[str, Any], folder: Path) -> None:
    import torch
    import transformers

    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = model_class(model_class.config_class(**{"dtype": "float32", **values}))
    model.to(getattr(torch, values.get("dtype", "float32")))  # the saved configuration has the model's type
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if architecture.startswith("Gemma") and name.endswith(_BRANCH_NORMS):
                weight.fill_(_GEMMA_BRANCH_WEIGHT)
            if architecture == _GPT_OSS and name.endswith("sinks"):
                weight.mul_(_SINK_SCALE).add_(_SINK_OFFSET)
            if architecture == _GPT_OSS and "down_proj" in name:
                weight.mul_(_EXPERT_SCALE)
    model.save_pretrained(folder)
    # SGLang reads what transformers has replaced by other keys.
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    if missing := values.keys() - saved.keys():
        path.write_text(json.dumps(saved | {name: values[name] for name in missing}, indent=2) + "\n")


def _publish(scratch: Path, folder: Path) -> None:
    """Move a finished model to its place; where another process was first, its model is the same."""
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.exists():
            raise
