"""The file of SGLang's `--config`, for what we have to know of an engine's arguments before there is an engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """Launch arguments with those of the file of `--config` in place of it, in the order in which SGLang merges them.

    Raises:
        ValueError: SGLang cannot read the file.
    """
    arguments = list(arguments)
    if "--config" not in arguments:
        return arguments
    try:
        merged: list[str] = _merger().merge_config_with_args(arguments)
    except Exception as error:  # YAML's own type, or whatever SGLang has against the file
        raise ValueError(f"--server-args: --config: {error}") from error
    return merged


def _merger() -> Any:
    """SGLang's reader of such files."""
    from sglang.srt.server_args import ServerArgs

    try:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger  # 0.5.19 and later
    except ImportError:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ConfigArgumentMerger(parser)
