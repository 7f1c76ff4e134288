"""What the batch command itself has to know of the arguments that an engine gets: its GPUs and its tokenizer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"--server-args: {message}")


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """SGLang's options by their names there; the others are left to SGLang.

    Raises:
        ValueError: an option has no usable value.
    """
    parser = _Parser(add_help=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--device")
    parser.add_argument("--tp-size", "--tp", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pp-size", "--pp", "--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--dp-size", "--dp", "--data-parallel-size", type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")
    parser.add_argument("--base-gpu-id", type=int, default=0)
    parser.add_argument("--gpu-id-step", type=int, default=1)
    return parser.parse_known_args(arguments)[0]


def has_tokenizer(model: str) -> bool:
    """Whether a model, or the folder of its tokenizer, has one; a name is looked up by SGLang, which needs one."""
    folder = Path(model)
    return not folder.is_dir() or any((folder / name).exists() for name in _TOKENIZER_FILES)


def gpus_per_engine(options: argparse.Namespace) -> int:
    """Ranks of an engine. With data parallel attention, replicas share the GPUs of tensor parallelism."""
    replicas: int = 1 if options.enable_dp_attention else options.dp_size
    return replicas * int(options.tp_size) * int(options.pp_size)
