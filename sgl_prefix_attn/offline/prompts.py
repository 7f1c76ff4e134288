"""All prompts of a batch as token ids in one array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


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
    def from_lists(cls, prompts: Iterable[Sequence[int] | Int32Array]) -> Prompts:
        """Prompts one by one; each is copied. Raises OverflowError for a token that 32 bits do not hold."""
        arrays = [np.zeros(0, np.int32), *(np.asarray(prompt, np.int32) for prompt in prompts)]
        return cls(np.concatenate(arrays), np.cumsum([len(array) for array in arrays], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, prompt: int) -> Int32Array:
        return self.tokens[self.offsets[prompt] : self.offsets[prompt + 1]]

    @property
    def lengths(self) -> Int64Array:
        """[prompts] tokens of each prompt."""
        return np.diff(self.offsets)
