"""The random-weight model: what transformers loads from it, and that its answer depends on the whole prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.serving.random_model import write_model

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4, "vocab_size": 500,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
CPU = torch.device("cpu")


def source_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPE, **changes}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_the_first_token_of_a_prompt_moves_the_answer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "model"
    total = write_model(source_folder(tmp_path / "source"), out, 2, CPU)
    matrices = 2 * 500 * 128 + 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)
    assert total == 2 * (matrices + 128 + 2 * 2 * 128)
    assert (out / "tokenizer.json").exists()
    model, loading = transformers.LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.config.num_hidden_layers == 2
    prompt = torch.randint(500, (1, 100), generator=torch.Generator().manual_seed(0))
    changed = prompt.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 500
    with torch.no_grad():
        one, other = (model.float()(tokens).logits[0, -1] for tokens in (prompt, changed))
    assert (one - other).abs().max() > 0.02 * one.std()


def test_other_architectures_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only LlamaForCausalLM"):
        write_model(source_folder(tmp_path / "gpt", architectures=["GPT2LMHeadModel"]), tmp_path / "out", None, CPU)
    with pytest.raises(ValueError, match=r"config\.json"):
        write_model(tmp_path / "none", tmp_path / "out", None, CPU)
