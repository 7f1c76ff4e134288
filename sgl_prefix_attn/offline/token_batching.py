"""Token batching (BatchLLM, 4.3.3): steps have prefill chunks beside decodes, and memory limits the requests.

A mixed step whose requests share much runs packed (`routing/mixed.py`). Any other one runs on the stock kernel, where
decodes lose their sharing. So `auto` mixes where steps of a job are likely to run packed, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from sgl_prefix_attn.core.planner import ModelShape
from sgl_prefix_attn.offline.messages import Ready, Steps
from sgl_prefix_attn.routing import mixed
from sgl_prefix_attn.settings import load_settings

CHOICES = ("auto", "on", "off")
_BLOCK_BYTES = 1024  # of a prompt's text, about 250 tokens
_LEAST_SHARED = 0.5
# Requests that an engine has at once. The most is SGLang's own limit.
_USUAL, _MOST = 512, 4096


def shared_part(lines: Iterable[bytes]) -> float:
    """Share of the prompts' text in blocks that an earlier prompt has at the same place after the same text."""
    known, total, shared = set(), 0, 0
    for line in lines:
        body = orjson.loads(line)["body"]
        text, before = orjson.dumps(body.get("messages") or body.get("prompt")), 0
        for start in range(0, len(text), _BLOCK_BYTES):
            block = text[start : start + _BLOCK_BYTES]
            before = hash((before, block))
            total += len(block)
            shared += len(block) if before in known else 0
            known.add(before)
    return shared / max(1, total)


def why_not(server_args: Any, head_dim: int, kv_bytes: int, shared: float) -> str:
    """Why `auto` does not mix on an engine with these arguments; "" if it does."""
    if server_args.device != "cuda":
        return f"it is not known to be faster on {server_args.device}"
    if server_args.attention_backend != "prefixpack" or load_settings().pack_mixed is False:
        return "mixed steps would not run packed"
    if not mixed.was_measured(ModelShape(1, 1, head_dim, kv_bytes)):
        return f"packed mixed steps were not measured with head_dim {head_dim} and {8 * kv_bytes}-bit KV"
    if shared < _LEAST_SHARED:
        return f"prompts share {shared:.0%} of their text, which is less than {_LEAST_SHARED:.0%}"
    return ""


def window(engines: Sequence[Ready], tokens: float) -> int:
    """Requests that an engine has at once: with mixed steps what its pool carries, and half of that to wait.

    Args:
        tokens: what a request needs of the pool: tokens of the prompt that no other one has, and expected output.
    """
    carried = [0 if engine.unmixed else engine.pool / max(1.0, tokens) for engine in engines]
    return min(_MOST, max(_USUAL, int(1.5 * min(carried))))


def report(engines: Sequence[Ready], window: int, steps: Sequence[Steps]) -> list[str]:
    """Lines of a batch's report."""
    lines = []
    if engines:
        unmixed = engines[0].unmixed
        how = f"is off: {unmixed}" if unmixed else "is on: prefills and decodes share steps"
        lines.append(f"token batching {how}; up to {window} requests at once")
    if count := sum(each.count for each in steps):
        mean, full = sum(each.tokens for each in steps) / count, sum(each.full for each in steps) / count
        lines.append(f"{count} steps with {mean:.1f} tokens on average")
        if chunk := engines[0].chunk:
            lines[-1] += f"; {full:.1%} had 90 % of the chunk of {chunk} or more"
    return lines
