"""Announces how often the requests of an offline batch will still use each prefix that they share.

The batch runner writes the shared prefixes and their uses into every request. The first request of a prefix announces
it; retention counts its uses down as requests of the job are admitted. Anybody who can send a request can write such a
parameter, so it is read only where the operator asks for it (the setting group_scheduling).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from sgl_prefix_attn.offline.queue_order import SharedPrefix
from sgl_prefix_attn.sglang_plugin.scheduling.group_scheduler import PlaceReader

_SEEN = "_prefixpack_announced"
# Jobs that ended early leave uses behind: the least recently used prefixes are forgotten, and announced again if
# further requests arrive.
_PREFIXES_KEPT = 1 << 16
# A prefix with more uses is announced again after these.
_MOST_USES = 1 << 16


class OfflinePrefixes:
    """Shared prefixes of offline jobs with requests still to come.

    Args:
        announce: takes a request, the span of its prompt to announce, and the uses.
    """

    def __init__(self, announce: Callable[[Any, SharedPrefix, int], None]) -> None:
        self._announce = announce
        self._places = PlaceReader()
        self._to_come: OrderedDict[tuple[str, int], int] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._to_come)

    def arrived(self, waiting: Iterable[Any]) -> None:
        """Announces the shared prefixes of requests that are seen for the first time."""
        for request in waiting:
            if getattr(request, _SEEN, None) is not None:
                continue
            place = self._places.place_of(request)
            setattr(request, _SEEN, () if place is None else place.prefixes)
            if place is None:
                continue
            for prefix in place.prefixes:
                key = (place.job, prefix.node)
                left = self._to_come.pop(key, 0)
                if left == 0:
                    left = min(prefix.uses, _MOST_USES)
                    self._announce(request, prefix, left)
                if left > 1:
                    self._to_come[key] = left - 1
            while len(self._to_come) > _PREFIXES_KEPT:
                self._to_come.popitem(last=False)

    @staticmethod
    def of(request: Any) -> tuple[SharedPrefix, ...]:
        """The announced prefixes of a request that has arrived."""
        return getattr(request, _SEEN, None) or ()

    def clear(self) -> None:
        """The cache is empty: what is still to come is announced again."""
        self._to_come.clear()
