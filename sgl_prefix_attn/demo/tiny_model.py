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
import sys
import tempfile
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
# Name -> class of transformers, and what its configuration has beside _SHAPE.
_VARIANTS = {
    name: (values.pop("architecture"), dict.fromkeys(values.pop("null", ())) | values)
    for name, values in tomllib.loads((Path(__file__).parent / "data" / "tiny_models.toml").read_text()).items()
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
