"""The retention score of a prefix: expected remaining uses divided by the time to the next one, per token."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_prefix_attn.pinning.lookahead import Lookahead
from sgl_prefix_attn.pinning.retained import MAX_PRIORITY, RetainedPrefixes
from sgl_prefix_attn.pinning.reuse import CLASSES, ReuseMemory

FINISHED_SCORE = -1.0  # below the score of an unknown prefix

# Score groups. 0 to CLASSES - 1 are the reuse classes of the memory; their positions are last uses.
UNKNOWN = CLASSES  # all positions are 0
QUEUED = CLASSES + 1  # positions are minus the number of the next request
ANNOUNCED = CLASSES + 2  # positions are remaining uses
FINISHED = CLASSES + 3  # all positions are 0
RETAINED = CLASSES + 4  # positions are priorities
KNOWN_USES = (QUEUED, ANNOUNCED)

Placement = tuple[int, int]


@dataclass(slots=True)
class _Announcement:
    """An announced prefix.

    Attributes:
        uses: those that remain.
        earned: whether others than the members have used the prefix. Then it does not go first in the end.
    """

    uses: int
    earned: bool


class RetentionScores:
    """Combines known future uses with remembered reuse.

    A prefix that a waiting request uses, the d-th from now, scores 1/d. A prefix of an announced group scores its
    remaining uses, since the members of a group run together. After the last one it scores FINISHED_SCORE until it is
    used again, unless others than the members have used it. Any other prefix scores what the reuse memory says, given
    that no waiting request uses it.

    A prefix that a hint keeps scores between 1 and 2 by its priority: no less than it has without the hint.

    Args:
        memory: reuse memory; None: prefixes without a known use score 0.
        lookahead: waiting requests; None: no queue is known.
        max_keys: finished prefixes remembered; the oldest are forgotten first.
        max_announced: announced prefixes remembered; the oldest are forgotten first, because a group that ended early
            never comes to its last use.
        max_retained: blocks that hints may keep.

    Attributes:
        on_change: called with each key whose placement may have changed.
        retained: what hints keep.

    Raises:
        ValueError: max_keys or max_announced is below 1.
    """

    def __init__(
        self,
        memory: ReuseMemory | None = None,
        lookahead: Lookahead | None = None,
        max_keys: int = 1 << 18,
        max_announced: int = 1 << 18,
        max_retained: int = 0,
    ) -> None:
        if max_keys < 1 or max_announced < 1:
            raise ValueError(f"max_keys is {max_keys} and max_announced {max_announced}: both have to be at least 1")
        self._max_keys, self._max_announced = max_keys, max_announced
        self.memory = memory
        self.lookahead = lookahead if lookahead is not None else Lookahead(0)
        self.lookahead.on_change = self._note
        self.on_change: Callable[[int], None] = _ignore
        self._changed: dict[int, None] = {}
        self.retained = RetainedPrefixes(max_retained, self._note)
        self._announced: dict[int, _Announcement] = {}  # least recently announced or used first
        self._finished: dict[int, None] = {}  # least recently finished first

    @property
    def any_finished(self) -> bool:
        """Whether the last announced use of some prefix is over."""
        return bool(self._finished)

    def announce(self, keys: Iterable[int], uses: int) -> None:
        """A group will use these prefixes `uses` times more; `scheduled` is told which requests are members.

        What others have used is not evicted first after the last member.

        Raises:
            ValueError: uses is below 1.
        """
        if uses < 1:
            raise ValueError(f"uses is {uses}: a group has at least one member")
        for key in keys:
            announced = self._announced.pop(key, None)
            if announced is None:
                used = self.memory is None or self.uses(key) > 0
                announced = _Announcement(0, earned=used)
            announced.uses += uses
            self._announced[key] = announced
            self._finished.pop(key, None)
            self._note(key)
        self._forget(self._announced, self._max_announced)
        self._publish()

    def retain(self, keys: Sequence[int], priority: int, expires: float, namespace: str | None) -> None:
        """As `RetainedPrefixes.keep`."""
        self.retained.keep(keys, priority, expires, namespace)
        self._publish()

    def give_up(self, keys: Sequence[int]) -> None:
        """As `RetainedPrefixes.give_up`."""
        self.retained.give_up(keys)
        self._publish()

    def expire(self, now: float) -> None:
        """As `RetainedPrefixes.expire`."""
        self.retained.expire(now)
        self._publish()

    def follow(self, queue: Sequence[Hashable], keys_of: Callable[[Hashable], Sequence[int]]) -> None:
        """Replaces the waiting queue, see `Lookahead.follow`."""
        self.lookahead.follow(queue, keys_of)
        self._publish()

    def remove(self, request: Hashable) -> None:
        """A request leaves the queue without a use of its prefixes."""
        self.lookahead.remove(request)
        self._publish()

    def scheduled(self, request: Hashable, keys: Sequence[int], member_of: Container[int] = ()) -> list[int]:
        """A request was admitted. Returns the keys whose last announced use this was.

        Args:
            member_of: the keys of announced groups in which the request is a member.
        """
        self.lookahead.remove(request)
        if self.memory is not None:
            for key in self.memory.record(keys):
                self._note(key)
        ended = []
        for key in keys:
            self._note(key)
            self._finished.pop(key, None)
            announced = self._announced.get(key)
            if announced is None:
                continue
            if key not in member_of:
                announced.earned = True
                continue
            del self._announced[key]
            announced.uses -= 1
            if announced.uses > 0:
                self._announced[key] = announced
                continue
            ended.append(key)
            if not announced.earned:
                self._finished[key] = None
        self._forget(self._finished, self._max_keys)
        self._publish()
        return ended

    def uses(self, key: int) -> int:
        """How often the prefix was used, as far as that is remembered."""
        return 0 if self.memory is None else self.memory.uses(key)

    def is_finished(self, key: int | None) -> bool:
        """Whether the last announced use of the prefix is over and no waiting request uses it."""
        return key in self._finished and not self.lookahead.uses(key)

    def of(self, key: int | None) -> float:
        """Score per token of the prefix with this key; None stands for a remainder shorter than a block."""
        return self.score(*self.placement(key))

    def placement(self, key: int | None) -> Placement:
        """Score group and position. Within a group, the order of the positions never changes.

        Scores of a group never fall with the position, but for the reuse classes: see `last_of_equal_score`.
        """
        if key is None:
            return UNKNOWN, 0
        announced, priority = self._announced.get(key), self.retained.priority(key)
        if announced is not None and (announced.uses > 1 or not priority):
            return ANNOUNCED, announced.uses
        if priority:
            return RETAINED, priority
        number = self.lookahead.next_request(key)
        if number is not None:
            return QUEUED, -number
        if key in self._finished:
            return FINISHED, 0
        record = None if self.memory is None else self.memory.placement(key)
        return (UNKNOWN, 0) if record is None else record

    def score(self, group: int, position: int) -> float:
        """Score per token of a placement."""
        if group < CLASSES:
            assert self.memory is not None
            return self.memory.score(group, position, len(self.lookahead))
        if group == QUEUED:
            return 1.0 / self.lookahead.distance(-position)
        if group == ANNOUNCED:
            return float(position)
        if group == RETAINED:
            return 1.0 + position / (MAX_PRIORITY + 1)
        return FINISHED_SCORE if group == FINISHED else 0.0

    def last_of_equal_score(self, group: int, position: int) -> int | None:
        """Last position of the same age bin, None for groups whose scores never fall with the position."""
        if group >= CLASSES:
            return None
        assert self.memory is not None
        return self.memory.last_of_age_bin(position)

    def clear(self) -> None:
        """The cache is empty: announced and finished groups and hints are gone. The memory stays."""
        self._announced.clear()
        self._finished.clear()
        self.retained.clear()

    def _note(self, key: int) -> None:
        self._changed[key] = None

    def _publish(self) -> None:
        changed, self._changed = self._changed, {}
        for key in changed:
            self.on_change(key)

    def _forget(self, keys: dict[int, Any], most: int) -> None:
        while len(keys) > most:
            key = next(iter(keys))
            del keys[key]
            self._note(key)


def _ignore(key: int) -> None:
    pass
