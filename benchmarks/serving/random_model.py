"""Writes a Llama of random weights on which attention decides the next token, in the shape of a given config.json.

    python -m benchmarks.serving.random_model --config models/llama3-8b-dummy --out /dev/shm/llama3-8b-random

The weights that --load-format dummy makes are so small that a model's answer hardly depends on its prompt; two
backends then agree whatever they compute. Here every matrix has a standard deviation of 1.6 / sqrt(inputs), as the tiny
model of the demonstration has: attention scores spread over several units, so a wrong or missing key shows in the
tokens. bf16, one file a layer. With a GPU and a folder in memory, 8 billion weights take some 20 s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GAIN = 1.6
SEED = 4
Tensors = dict[str, torch.Tensor]


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of one decoder layer's weights by name, without its prefix."""
    hidden, stock = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "mlp.gate_proj.weight": (stock, hidden),
        "mlp.up_proj.weight": (stock, hidden),
        "mlp.down_proj.weight": (hidden, stock),
    }


def shards(config: dict[str, Any], device: torch.device) -> Iterator[Tensors]:
    """The weights, a layer at a time, on the CPU."""
    generator = torch.Generator(device).manual_seed(SEED)

    def weight(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (drawn * (GAIN / shape[1] ** 0.5)).to(torch.bfloat16).cpu()

    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    ends = {"model.embed_tokens.weight": weight((vocabulary, hidden)), "model.norm.weight": weight((hidden,))}
    if not config.get("tie_word_embeddings"):
        ends["lm_head.weight"] = weight((vocabulary, hidden))
    yield ends
    for layer in range(config["num_hidden_layers"]):
        yield {f"model.layers.{layer}.{name}": weight(shape) for name, shape in layer_shapes(config).items()}


def write_model(source: Path, out: Path, layers: int | None, device: torch.device) -> int:
    """Writes the model and returns its size in bytes.

    Raises:
        ValueError: the source has no config.json, or its architecture is not Llama's.
    """
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{source}: {error}") from error
    if config.get("architectures") != ["LlamaForCausalLM"]:
        raise ValueError(f"{source} is of architecture {config.get('architectures')}; only LlamaForCausalLM is written")
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    config["torch_dtype"] = "bfloat16"
    out.mkdir(parents=True, exist_ok=True)
    for beside in source.iterdir():  # a tokenizer
        if (
            beside.is_file()
            and beside.suffix not in (".safetensors", ".bin")
            and not beside.name.endswith("index.json")
        ):
            shutil.copy(beside, out / beside.name)
    files: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards(config, device)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, out / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.random_model", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", type=Path, required=True, help="folder with a Llama's config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--layers", type=int, help="fewer layers than in the config")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="draws the weights")
    args = parser.parse_args()
    try:
        total = write_model(args.config, args.out, args.layers, torch.device(args.device))
    except ValueError as error:
        print(f"random_model: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {total / 1e9:.1f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
