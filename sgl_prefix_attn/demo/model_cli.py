"""`python -m sgl_prefix_attn tiny-model FOLDER`: a model for trials where no model hub is in reach."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from sgl_prefix_attn.demo.tiny_model import VARIANTS, VOCABULARY, tiny_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a model of random weights and a few megabytes, as SGLang and transformers load it. It has no tokenizer: "
        f"start servers with --skip-tokenizer-init and send `input_ids` below {VOCABULARY}."
    )
    parser.add_argument("folder", type=Path, help="where to write it; must not exist")
    parser.add_argument("--variant", choices=VARIANTS, default="llama", help="architecture (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    try:
        shutil.copytree(tiny_model(args.variant), args.folder)
    except FileExistsError:
        print(f"tiny-model: {args.folder}: exists; remove it, or name another folder", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"tiny-model: {error}", file=sys.stderr)
        return 2
    return 0
