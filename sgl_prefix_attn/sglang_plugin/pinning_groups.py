"""Tells a keeper how often the requests of an offline batch will still use each prefix that they share.

The batch runner writes into every request what it shares, and with how many; so whichever comes first announces a
prefix, and the keeper counts its uses down as requests are admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sgl_prefix_attn.sglang_plugin.group_scheduling import place_of
from sgl_prefix_attn.sglang_plugin.pinning_locks import Namespace

_SEEN = "_prefixpack_announced"


class OfflinePrefixes:
    """The shared prefixes of offline jobs of which requests are still to come.

    Args:
        announce: takes the tokens of a prompt up to a position, the uses to come, the namespace, and the position
            where what is announced begins.
    """

    def __init__(self, announce: Callable[[Sequence[int], int, Namespace, int], None]) -> None:
        self._announce = announce
        self._to_come: dict[tuple[str, int], int] = {}

    def __len__(self) -> int:
        return len(self._to_come)

    def arrived(self, waiting: Iterable[Any]) -> None:
        """Announces what requests that have not been seen before share."""
        for request in waiting:
            if getattr(request, _SEEN, False):
                continue
            setattr(request, _SEEN, True)
            place = place_of(request)
            if place is None:
                continue
            for prefix in place.prefixes:
                key = (place.job, prefix.node)
                left = self._to_come.pop(key, 0)
                if left == 0:
                    left = prefix.uses
                    tokens = request.origin_input_ids[: prefix.end]
                    self._announce(tokens, left, Namespace.of_request(request), prefix.begin)
                if left > 1:
                    self._to_come[key] = left - 1
