"""Runs the groups of an offline job together inside SGLang's own queue.

A request belongs to a job if its sampling parameters say so (`CUSTOM_PARAMETER`, as the batch runner sets it); for all
others nothing changes, and they go before the job's. This gatekeeper brings the job's waiting requests into order. It
holds one back while the prefix it shares is being computed by another, or while there is no memory for what
has been begun: admission goes by the KV footprint of the groups, which is their prefixes once, their tails and their
whole expected decode growth (BatchLLM, section 4.3.3: memory instead of a number of requests). SGLang itself reserves a
part of the growth and retracts requests when that was too little; a retracted request computes its prompt again.

Anybody who can send a request can write such a parameter, so its value is checked before it is used. A request with a
malformed one is in no job, and nobody else notices. A job belongs to one namespace and to those who know its name. What
they say of their requests holds another one back for at most MOST_ROUNDS rounds of admission.

Holding back means AddReqResult.OTHER, which ends this round of admission only; never NO_TOKEN, which can stop
admission for good; and never while nothing runs. Decisions depend on the queue alone, so all ranks take the same ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

from sgl_prefix_attn.offline.queue_order import (
    CUSTOM_PARAMETER,
    WORTH_WAITING_FOR,
    Place,
    QueueOrder,
    Turn,
    Waiting,
)
from sgl_prefix_attn.sglang_plugin.compat import versions
from sgl_prefix_attn.sglang_plugin.scheduling.admission import Gatekeeper
from sgl_prefix_attn.sglang_plugin.telemetry.failures import Failures

logger = logging.getLogger(__name__)

OTHER_ORDER = "the queue has another order than fcfs, which the server's arguments ask for"
MOST_ROUNDS = 1024  # a prefill of 2^20 tokens has 128 chunks of 8,192

_PLACE = "_prefixpack_place"
_ROUNDS = "_prefixpack_rounds"
_MALFORMED = "_prefixpack_malformed"


class PlaceReader:
    """Reads the places of requests in offline jobs.

    Attributes:
        malformed: number of requests with a malformed place; they run as requests of no job.
    """

    def __init__(self) -> None:
        self.malformed = 0

    def place_of(self, request: Any) -> Place | None:
        """The request's place in an offline job, None if it is in none. The first malformed place is logged."""
        place = getattr(request, _PLACE, None)
        if place is None and not getattr(request, _MALFORMED, False):
            parameters = request.sampling_params.custom_params
            if not isinstance(parameters, dict) or CUSTOM_PARAMETER not in parameters:
                return None
            try:
                place = _checked(Place.decode_list(parameters[CUSTOM_PARAMETER]), len(request.origin_input_ids))
            except ValueError as error:
                setattr(request, _MALFORMED, True)
                if not self.malformed:
                    logger.warning(
                        "prefixpack: requests with a malformed place run as ones of no offline job: %s", error
                    )
                self.malformed += 1
                return None
            # Requests of different namespaces share nothing, whatever they say.
            namespace = getattr(request, "extra_key", None), getattr(request, "cache_salt", None)
            place = replace(place, job=repr((place.job, *namespace)))
            setattr(request, _PLACE, place)
        return place


class GroupScheduler(Gatekeeper):
    """The offline jobs of one scheduler process.

    Attributes:
        places: reads the places of requests.
        held_back: how often a request was held back: "prefix" being computed, "memory" reserved for others.

    Args:
        record: what is off in the process.
    """

    gate = "group_scheduling"
    unhooked = queue_unhooked = "offline jobs run as they come"

    def __init__(self, record: Failures) -> None:
        self._record = record
        self.places = PlaceReader()
        self.held_back: Counter[str] = Counter()
        self._other_order = False
        self._order: QueueOrder[Any] = QueueOrder()
        self._turns: dict[Any, Turn[Any]] = {}
        self._output_at_start: dict[Any, int] = {}
        self._growth: tuple[Any, float] = (None, 0.0)

    def queue_ordered(self, policy: Any, waiting: list[Any]) -> None:
        """Brings the offline requests of the queue into order, in place; the others stay in front, in their order."""
        jobs = [(request, place) for request in waiting if (place := self.places.place_of(request)) is not None]
        if not jobs:
            self._turns.clear()
            return
        if not _first_come_first_served(policy):
            if not self._other_order:
                logger.warning("prefixpack: group_scheduling is off: %s", OTHER_ORDER)
                self._record.switch_off("group_scheduling", OTHER_ORDER)
                self._other_order = True
            return
        self._note_ended()
        of_jobs = [
            Waiting(request, _possible(request, place), len(request.origin_input_ids), len(request.output_ids))
            for request, place in jobs
        ]
        turns = self._order.arrange(of_jobs)
        self._turns = {turn.request: turn for turn in turns}
        online = [request for request in waiting if request not in self._turns]
        waiting[:] = [*online, *(turn.request for turn in turns)]

    def holds_back(self, adder: Any, request: Any) -> str | None:
        """OTHER for an offline request that has just been matched with the cache and is better not admitted now."""
        turn = self._turns.get(request)
        if turn is None or not (adder.can_run_list or versions.anything_runs(adder)):
            return None
        matched = versions.matched_tokens(request)
        own = len(request.origin_input_ids) + len(request.output_ids) - matched + turn.decode
        left = adder.rem_total_tokens - own - self._unreserved_growth(adder)
        reason = "memory" if left < 0 else None
        rounds = getattr(request, _ROUNDS, 0)
        if rounds < MOST_ROUNDS:  # what other requests say of themselves counts
            coming = matched + WORTH_WAITING_FOR < turn.coming
            if coming or left < turn.reserved:
                reason = "prefix" if coming else "memory"
                setattr(request, _ROUNDS, rounds + 1)
        if reason is None:
            return None
        self.held_back[reason] += 1
        return "OTHER"

    def admitted(self, adder: Any, request: Any) -> None:
        """Notes an offline request that is being computed."""
        if request in self._turns:
            del self._turns[request]
            self._output_at_start[request] = len(request.output_ids)
            self._order.admitted(request, getattr(request, _PLACE))

    def _unreserved_growth(self, adder: Any) -> float:
        """KV tokens that running requests of jobs are expected to need beyond what the adder has reserved for them.

        What others may need is SGLang's own estimate: their limits are often far from what they use.
        """
        if self._growth[0] is not adder:  # one adder for each round of admission
            growth = 0.0
            for request in () if adder.running_batch is None else adder.running_batch.reqs:
                place = self.places.place_of(request)
                if place is None:
                    continue
                generated = len(request.output_ids)
                limit = max(0, request.sampling_params.max_new_tokens - generated)
                growth += min(limit, max(0, place.decode - generated)) - limit * adder.new_token_ratio
            self._growth = (adder, max(0.0, growth))
        return self._growth[1]

    def _note_ended(self) -> None:
        for request in self._order.computing():
            generated = len(request.output_ids) > self._output_at_start[request]
            if generated or request.finished():
                # The first token and the insertion of the prompt into the tree are one step.
                self._order.ended(request, cached=generated)
        computing = set(self._order.computing())
        self._output_at_start = {r: length for r, length in self._output_at_start.items() if r in computing}


def _checked(place: Place, prompt: int) -> Place:
    """The place, if it fits a prompt of so many tokens. Raises ValueError."""
    end = max([place.shared, *(prefix.end for prefix in place.prefixes[-1:])])
    if end > prompt:
        raise ValueError(f"a place in an offline job shares {end} tokens of a prompt; expected at most its {prompt}")
    return place


def _possible(request: Any, place: Place) -> Place:
    """The place with no more output expected than the request may generate, so that it can be admitted some day."""
    limit = request.sampling_params.max_new_tokens
    return place if place.decode <= limit else replace(place, decode=limit)


def _first_come_first_served(policy: Any) -> bool:
    """Another policy, or priorities, are the user's own wish for an order."""
    return getattr(policy.policy, "value", policy.policy) == "fcfs" and not policy.enable_priority_scheduling
