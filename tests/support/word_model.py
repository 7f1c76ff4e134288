"""The tiny model with a tokenizer of its own, for commands that send text: a word is a token."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sgl_prefix_attn.demo.server import ServerOptions
from sgl_prefix_attn.demo.tiny_model import RESERVED_TOKENS, VOCABULARY, tiny_model

TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"


def word_model(folder: Path, variant: str = "llama") -> Path:
    """A new folder with the model. Words are `w10` to `w1023`; all others are one unknown word."""
    shutil.copytree(tiny_model(variant), folder)
    words = {f"w{number}": number for number in range(RESERVED_TOKENS, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel({"<unk>": RESERVED_TOKENS - 1} | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=TEMPLATE).save_pretrained(
        folder
    )
    return folder


def prompts_file(path: Path, count: int = 2, length: int = 60) -> Path:
    """A text file with a prompt on each line; they share nothing."""
    lines = [" ".join(f"w{20 + number * length + at}" for at in range(length)) for number in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


class WordServer(ServerOptions):
    """A server that takes text."""

    def command(self, port: int, nccl_port: int | None = None) -> list[str]:
        return [word for word in super().command(port, nccl_port) if word != "--skip-tokenizer-init"]
