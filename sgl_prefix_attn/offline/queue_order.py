"""Order of the waiting requests of an offline job. A request that can use a prefix waits until it is computed.

Knows nothing of SGLang: a request is whatever the caller hands in, together with its `Place`. A job's requests are
numbered in the order in which they should run (`GroupOrder`), and each says how many tokens it has in common with the
one before; what any two share follows from that as long as the order is depth first, and is never overestimated
otherwise.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

# Key in a request's custom_params whose value is its encoded Place.
CUSTOM_PARAMETER = "prefixpack_offline"
# Key in a scheduler's state. Its value has `steps` ([count, tokens, full ones]), `chunk`, and whether they are `mixed`.
STEPS_KEY = "prefixpack_steps"
# A shorter common prefix is not worth waiting for: computing it again takes less than a step. SGLang's in-batch prefix
# caching has the same threshold.
WORTH_WAITING_FOR = 32
# A job's queue may run empty for a moment; what is known about that many such jobs is kept.
_IDLE_JOBS_KEPT = 4
# Requests that no longer wait or compute count only as long as one numbered lower waits; that many are remembered.
_NUMBERS_KEPT = 1 << 14
_ALL = 1 << 60
# A place comes from whoever sends a request.
_NUMBER_LIMIT = 1 << 31
_JOB_NAME_LIMIT = 200

RequestT = TypeVar("RequestT", bound=Hashable)


class SharedPrefix(NamedTuple):
    """A span of a prompt that requests of its job share.

    Attributes:
        node: its number within the job.
        begin, end: token positions.
        uses: how many of the job's requests have it in their prompt.
    """

    node: int
    begin: int
    end: int
    uses: int


@dataclass(frozen=True)
class Place:
    """Where a request stands in its job.

    Attributes:
        job: name of the job; jobs are independent of each other.
        number: 0, 1, ... in the order in which the requests should run. Samples of one prompt share a number.
        shared: tokens in common with the request numbered one less.
        decode: expected output tokens.
        prefixes: what of its prompt is shared, from the beginning on.
    """

    job: str
    number: int
    shared: int
    decode: int
    prefixes: tuple[SharedPrefix, ...] = ()

    def encode(self) -> list[str | int]:
        """The place as a list that survives JSON."""
        return [self.job, self.number, self.shared, self.decode, *itertools.chain.from_iterable(self.prefixes)]

    @classmethod
    def decode_list(cls, values: object) -> Place:
        """The place that `encode` made a list of. Raises ValueError for anything else, whatever its type."""
        if isinstance(values, (list, tuple)) and len(values) >= 4 and len(values) % 4 == 0:
            job, *numbers = values
            whole = [value for value in numbers if type(value) is int and 0 <= value < _NUMBER_LIMIT]
            if isinstance(job, str) and len(job) <= _JOB_NAME_LIMIT and len(whole) == len(numbers):
                prefixes = tuple(SharedPrefix(*whole[at : at + 4]) for at in range(3, len(whole), 4))
                if _one_after_the_other(prefixes):
                    return cls(job, whole[0], whole[1], whole[2], prefixes)
        raise ValueError(
            f"{reprlib.repr(values)} is no place in an offline job; "
            "expected [job, number, shared, decode] and [node, begin, end, uses] of each shared prefix, where job is a "
            f"text of up to {_JOB_NAME_LIMIT} characters, all others are whole numbers from 0 to {_NUMBER_LIMIT - 1}, "
            "no prefix is empty or begins before the end of the one before, and uses is 1 or more"
        )


def _one_after_the_other(prefixes: Sequence[SharedPrefix]) -> bool:
    end = 0
    for prefix in prefixes:
        if not end <= prefix.begin < prefix.end or prefix.uses < 1:
            return False
        end = prefix.end
    return True


@dataclass(frozen=True)
class Waiting(Generic[RequestT]):
    """A waiting request.

    Attributes:
        prompt: tokens of its prompt.
        output: tokens generated so far, if it was retracted.
    """

    request: RequestT
    place: Place
    prompt: int
    output: int = 0


@dataclass(frozen=True)
class Turn(Generic[RequestT]):
    """What is known about a waiting request.

    Attributes:
        coming: tokens it has in common with a request whose prefill is under way or that goes ahead of it. If clearly
            fewer are in the cache when its turn comes, it should wait.
        reserved: KV tokens that requests numbered lower will need, which wait for a prefix that is under way.
        decode: expected output tokens from now on.
        waits: whether it waits for a prefix itself.
    """

    request: RequestT
    coming: int
    reserved: int
    decode: int
    waits: bool


@dataclass
class _Job(Generic[RequestT]):
    shared: dict[int, int] = field(default_factory=dict)  # by number; of all that wait or are in the other two
    computing: dict[RequestT, int] = field(default_factory=dict)  # prefill under way -> number
    computed: set[int] = field(default_factory=set)


class QueueOrder(Generic[RequestT]):
    """Keeps, for each offline job, what has been computed and what is being computed."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job[RequestT]] = {}

    def admitted(self, request: RequestT, place: Place) -> None:
        """The prefill of `request` starts."""
        self._job(place).computing[request] = place.number

    def computing(self) -> list[RequestT]:
        """Requests whose prefill is under way."""
        return [request for job in self._jobs.values() for request in job.computing]

    def ended(self, request: RequestT, *, cached: bool) -> None:
        """The prefill of `request` ended; `cached`: its prompt is in the cache now."""
        for job in self._jobs.values():
            number = job.computing.pop(request, None)
            if number is not None and cached:
                job.computed.add(number)

    def arrange(self, waiting: Sequence[Waiting[RequestT]]) -> list[Turn[RequestT]]:
        """The waiting requests in the order in which to take them: by number, those that wait for a prefix last."""
        by_job: dict[str, dict[int, list[Waiting[RequestT]]]] = {}
        for entry in waiting:
            self._job(entry.place).computing.pop(entry.request, None)  # there if it was retracted
            by_job.setdefault(entry.place.job, {}).setdefault(entry.place.number, []).append(entry)
        turns = [turn for name, entries in by_job.items() for turn in self._walk(self._jobs[name], entries)]
        self._forget(by_job.keys())
        return [turn for turn in turns if not turn.waits] + [turn for turn in turns if turn.waits]

    def _job(self, place: Place) -> _Job[RequestT]:
        job = self._jobs.setdefault(place.job, _Job())
        job.shared[place.number] = place.shared
        return job

    def _walk(self, job: _Job[RequestT], waiting: dict[int, list[Waiting[RequestT]]]) -> list[Turn[RequestT]]:
        first, last = min(waiting), max(waiting)
        computing = set(job.computing.values())
        # From the last request that is computed in front of everything else: what lies before does not matter.
        floor = min([first, *computing])
        start = max((number for number in job.computed if number < floor), default=floor)
        turns = []
        # Tokens in common with the nearest request before that has been computed, and with the nearest one that is
        # being computed or goes ahead.
        cached = coming = reserved = 0
        before = start
        # Numbers are the sender's: from one to the next that is known can be any distance.
        for number in sorted(number for number in job.shared if start <= number <= last):
            # Nothing is known of what a request shares with one that is not there.
            shared = job.shared[number] if number <= before + 1 else 0
            before = number
            cached, coming = min(cached, shared), min(coming, shared)
            if number in job.computed:
                cached = _ALL
            if number in computing:
                coming = _ALL
            for entry in waiting.get(number, ()):
                waits = coming > cached + WORTH_WAITING_FOR
                decode = max(0, entry.place.decode - entry.output)
                # At least one token of a prompt is always computed.
                turns.append(Turn(entry.request, min(coming, entry.prompt - 1), reserved, decode, waits))
                if waits:
                    reserved += max(1, entry.prompt - coming) + entry.output + decode
                else:
                    coming = _ALL
        self._forget_numbers(job, [number for number in job.shared if number < start])
        done = job.shared.keys() - waiting.keys() - computing
        if len(done) > _NUMBERS_KEPT:
            self._forget_numbers(job, sorted(done)[:-_NUMBERS_KEPT])
        return turns

    @staticmethod
    def _forget_numbers(job: _Job[RequestT], numbers: Sequence[int]) -> None:
        job.computed.difference_update(numbers)
        for number in numbers:
            del job.shared[number]

    def _forget(self, current: Container[str]) -> None:
        idle = [name for name, job in self._jobs.items() if name not in current and not job.computing]
        for name in idle[:-_IDLE_JOBS_KEPT]:
            del self._jobs[name]
