"""Keys of prefixes: one hash per full block of a prompt, of all tokens up to the end of the block."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_TOKEN_BYTES = 8


def prefix_keys(tokens: Sequence[int], block: int, namespace: str | None = None) -> list[int]:
    """Keys of the full blocks of `tokens`: equal keys mean equal tokens from position 0 to the end of the block.

    Equal on every rank and in every run: independent of Python's hash seed.

    Args:
        tokens: token ids; the tokens after the last full block have no key.
        block: tokens per block.
        namespace: prompts of different namespaces (LoRA adapter, cache salt) never share a key.

    Raises:
        ValueError: `block` is below 1.
    """
    if block < 1:
        raise ValueError(f"block is {block}: a block needs at least one token")
    data = memoryview(array("q", tokens).tobytes())
    size = block * _TOKEN_BYTES
    state = blake2b((namespace or "").encode(), digest_size=8)
    keys = []
    for end in range(size, len(data) + 1, size):
        state.update(data[end - size : end])
        keys.append(int.from_bytes(state.digest(), "little"))
    return keys
