"""Announces how often the requests of an offline batch will still use each prefix that they share.

The batch runner writes the shared prefixes and their uses into every request. The first request of a prefix announces
it; retention counts its uses down as requests are admitted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from sgl_prefix_attn.offline.queue_order import SharedPrefix
from sgl_prefix_attn.sglang_plugin.offline.group_scheduler import PlaceReader

_SEEN = "_prefixpack_announced"
# Jobs that ended early leave uses behind: the least recently used prefixes are forgotten, and announced again if
# further requests arrive.
_PREFIXES_KEPT = 1 << 16


class OfflinePrefixes:
    """Shared prefixes of offline jobs with requests still to come.

    Args:
        announce: takes a request and the span of its prompt to announce.
    """

    def __init__(self, announce: Callable[[Any, SharedPrefix], None]) -> None:
        self._announce = announce
        self._places = PlaceReader()
        self._to_come: OrderedDict[tuple[str, int], int] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._to_come)

    def arrived(self, waiting: Iterable[Any]) -> None:
        """Announces the shared prefixes of requests that are seen for the first time."""
        for request in waiting:
            if getattr(request, _SEEN, False):
                continue
            setattr(request, _SEEN, True)
            place = self._places.place_of(request)
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
