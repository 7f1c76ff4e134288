"""Prompts that share the storage of their common beginnings: memory grows with what is cached, not with prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, overload


class _Part:
    """Tokens [begin, end) of one or more prompts, and keys from number `first_key` on. `before`: what comes before."""

    __slots__ = ("before", "begin", "first_key", "keys", "tokens")

    def __init__(self, before: _Part | None, begin: int, tokens: array[int], first_key: int, keys: array[int]) -> None:
        self.before, self.begin, self.tokens = before, begin, tokens
        self.first_key, self.keys = first_key, keys

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    def split(self, position: int, key: int) -> _Part:
        """Cuts this part off at a position between its ends. Returns the part before it, with the keys before `key`."""
        middle, index = position - self.begin, key - self.first_key
        upper = _Part(self.before, self.begin, self.tokens[:middle], self.first_key, self.keys[:index])
        self.before, self.begin, self.tokens = upper, position, self.tokens[middle:]
        self.first_key, self.keys = key, self.keys[index:]
        return upper


class StoredPrompt(Sequence[int]):
    """The prefix keys of a prompt, as a sequence, with its tokens.

    Args:
        tokens: of the whole prompt.
        keys: `prefix_keys` of the tokens, or of a prompt that begins with them.
        block: tokens per key.
        namespace: kept with the prompt.
        like: a prompt with the same beginning, whose storage is used.
        shared: tokens of that beginning.
    """

    __slots__ = ("_last", "namespace")

    def __init__(
        self,
        tokens: Sequence[int],
        keys: Sequence[int],
        block: int,
        namespace: Any = None,
        like: StoredPrompt | None = None,
        shared: int = 0,
    ) -> None:
        self.namespace = namespace
        # The key of the block that the common part ends in depends on what comes after it.
        before, first_key = None, shared // block
        if like is not None and shared > 0:
            before = like._until(shared, first_key)
        else:
            shared = first_key = 0
        self._last = _Part(before, shared, array("q", tokens[shared:]), first_key, array("Q", keys[first_key:]))

    def __len__(self) -> int:
        return self._last.first_key + len(self._last.keys)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        part = self._last
        while index < part.first_key:
            assert part.before is not None
            part = part.before
        return part.keys[index - part.first_key]

    def tokens(self, begin: int, end: int) -> array[int]:
        """Tokens [begin, end), as far as the prompt goes."""
        pieces = []
        part: _Part | None = self._last
        while part is not None and part.end > begin:
            pieces.append(part.tokens[max(0, begin - part.begin) : max(0, end - part.begin)])
            part = part.before
        found = array("q")
        for piece in reversed(pieces):
            found.extend(piece)
        return found

    def _until(self, position: int, key: int) -> _Part:
        """The part that ends at a position, after a split if necessary."""
        part = self._last
        while part.begin >= position:
            assert part.before is not None
            part = part.before
        return part if part.end == position else part.split(position, key)
