"""Tiny models that take text, with tokenizers, templates and defaults that differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sgl_prefix_attn.demo.tiny_model import tiny_model
from tests.offline.body_grammar import WORDS

SPECIAL = ["<pad>", "<s>", "</s>", "<user>", "<assistant>", "<tool>", "<system>", "<developer>", "<think>", "</think>"]
# The content of a message is a list in the one, and text in the other.
PARTS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}"
    "{% endif %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
TEXT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
)
PARSERS = ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")


def with_parts(folder: Path) -> Path:
    """Qwen 3, defaults of its own, a template that takes parts and tools."""
    made = _model(folder, "qwen3", PARTS, begins=False)
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [2, 30]}
    (made / "generation_config.json").write_text(json.dumps(defaults))
    return made


def with_text(folder: Path) -> Path:
    """Llama, greedy by default, a tokenizer that adds its first token, a template that refuses some chats."""
    made = _model(folder, "llama", TEXT, begins=True)
    (made / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": 2}))
    return made


def _model(folder: Path, variant: str, template: str, *, begins: bool) -> Path:
    shutil.copytree(tiny_model(variant), folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=template
    ).save_pretrained(folder)
    return folder
