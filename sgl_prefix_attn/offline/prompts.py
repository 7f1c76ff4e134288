"""All prompts of a batch as token ids in one array."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_MAX_TOKEN = 2**31 - 1


class Prompts:
    """Token ids of many prompts, read-only: prompt r is `tokens[offsets[r]:offsets[r + 1]]`.

    Args:
        tokens: int32 [all tokens]; kept, not copied.
        offsets: int64 [prompts + 1], from 0 to len(tokens), not decreasing.

    Raises:
        TypeError: another dtype (a conversion would copy what may be gigabytes).
    """

    def __init__(self, tokens: Int32Array, offsets: Int64Array) -> None:
        for name, values, dtype in (("tokens", tokens, np.int32), ("offsets", offsets, np.int64)):
            if values.dtype != dtype or not values.flags.c_contiguous:
                raise TypeError(f"{name} must be a contiguous array of {dtype.__name__}, not of {values.dtype}")
        self.tokens = tokens
        self.offsets = offsets

    @classmethod
    def from_lists(cls, prompts: Iterable[Sequence[int]]) -> Prompts:
        """Raises ValueError for a token that is no whole number from 0 to 2^31 - 1, naming prompt and token."""
        builder = PromptsBuilder()
        for prompt in prompts:
            builder.append(prompt)
        return builder.finish()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, prompt: int) -> Int32Array:
        return self.tokens[self.offsets[prompt] : self.offsets[prompt + 1]]

    @property
    def lengths(self) -> Int64Array:
        """[prompts] tokens of each prompt."""
        return np.diff(self.offsets)


class PromptsBuilder:
    """Collects prompts one by one; 4 bytes a token."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._offsets = array("q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, prompt: Sequence[int]) -> None:
        """Raises ValueError for a token that is no whole number from 0 to 2^31 - 1; nothing is added then."""
        before = len(self._tokens)
        try:
            self._tokens.extend(prompt)
        except (TypeError, OverflowError):
            bad = next(token for token in prompt if not isinstance(token, int) or not 0 <= token <= _MAX_TOKEN)
        else:
            added = np.frombuffer(self._tokens, dtype=np.int32)[before:]
            if added.size == 0 or added.min() >= 0:
                self._offsets.append(before + added.size)
                return
            bad = int(added.min())
            del added  # a view locks the array's size
        del self._tokens[before:]
        raise ValueError(f"prompt {len(self)}: token {bad!r} is no whole number from 0 to {_MAX_TOKEN}")

    def finish(self) -> Prompts:
        """The prompts so far, without a copy; the builder takes no more after that."""
        tokens = np.frombuffer(self._tokens, dtype=np.int32)
        tokens.setflags(write=False)
        offsets = np.frombuffer(self._offsets, dtype=np.int64)
        offsets.setflags(write=False)
        return Prompts(tokens, offsets)
