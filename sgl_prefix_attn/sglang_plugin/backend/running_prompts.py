"""Fingerprints of the running requests' prompts for GET /server_info, so that servers can be compared.

A prompt is cut into blocks. The hash of a block covers all tokens before it as well, so equal hashes mean equal
prefixes, on any server. Tokens cannot be read from them, but a prompt can be recognized by who knows it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Any

BLOCK = 512
# Of larger batches and longer prompts the rest is left out, so that the scheduler answers within some 10 ms.
MAX_REQUESTS = 1024
MAX_BLOCKS = 64
_HASH_BYTES = 6


class RunningPrompts:
    """Hashes each prompt once while it runs."""

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}

    def state(self, requests: Iterable[Any]) -> dict[str, Any]:
        """The prompts of requests as JSON-able values.

        Args:
            requests: SGLang's `Req` objects.

        Returns:
            {"block": tokens of a block, "prompts": [{"tokens": length, "hashes": of its blocks, the last one shorter}]}
        """
        known, prompts = {}, []
        for request in list(requests)[:MAX_REQUESTS]:
            hashes = self._known.get(request.rid)
            known[request.rid] = hashes = block_hashes(request.origin_input_ids) if hashes is None else hashes
            tokens = min(len(request.origin_input_ids), BLOCK * MAX_BLOCKS)
            prompts.append({"tokens": tokens, "hashes": hashes})
        self._known = known
        return {"block": BLOCK, "prompts": prompts}


def block_hashes(tokens: Any) -> list[str]:
    """The hashes of a prompt's blocks, each with all blocks before it."""
    data = tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)
    running = hashlib.blake2b(digest_size=_HASH_BYTES)
    hashes = []
    for start in range(0, min(len(data), BLOCK * MAX_BLOCKS), BLOCK):
        running.update(data[start : start + BLOCK].tobytes())
        hashes.append(running.copy().hexdigest())
    return hashes
