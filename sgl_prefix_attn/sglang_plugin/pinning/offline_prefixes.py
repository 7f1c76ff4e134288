"""Tells a manager how often the requests of an offline batch will still use each prefix that they share.

The batch runner writes into every request what it shares, and with how many; so whichever comes first announces a
prefix, and the manager counts its uses down as requests are admitted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from sgl_prefix_attn.offline.queue_order import SharedPrefix
from sgl_prefix_attn.sglang_plugin.offline.group_scheduler import place_of

_SEEN = "_prefixpack_announced"
# Of jobs that ended early requests never come; the prefixes used longest ago are forgotten, and announced again if
# requests with them come after all.
_PREFIXES_KEPT = 1 << 16


class OfflinePrefixes:
    """The shared prefixes of offline jobs of which requests are still to come.

    Args:
        announce: takes a request and what of its prompt is announced.
    """

    def __init__(self, announce: Callable[[Any, SharedPrefix], None]) -> None:
        self._announce = announce
        self._to_come: OrderedDict[tuple[str, int], int] = OrderedDict()  # used longest ago first

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
                    self._announce(request, prefix)
                if left > 1:
                    self._to_come[key] = left - 1
            while len(self._to_come) > _PREFIXES_KEPT:
                self._to_come.popitem(last=False)
