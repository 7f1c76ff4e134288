"""The order of waiting requests: what it costs and keeps does not depend on the numbers that senders choose."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_prefix_attn.offline import queue_order
from sgl_prefix_attn.offline.queue_order import Place, QueueOrder, Turn, Waiting

LENGTHS = st.sampled_from([0, 20, 33, 60, 100])


class StepByStep(QueueOrder[int]):
    """The same, over every number from the first to the last: how the result is defined."""

    def _walk(self, job, waiting):
        first, last = min(waiting), max(waiting)
        computing = set(job.computing.values())
        floor = min([first, *computing])
        start = max((number for number in job.computed if number < floor), default=floor)
        turns = []
        cached = coming = reserved = 0
        for number in range(start, last + 1):
            shared = job.shared.get(number, 0)
            cached, coming = min(cached, shared), min(coming, shared)
            if number in job.computed:
                cached = queue_order._ALL
            if number in computing:
                coming = queue_order._ALL
            for entry in waiting.get(number, ()):
                waits = coming > cached + queue_order.WORTH_WAITING_FOR
                decode = max(0, entry.place.decode - entry.output)
                turns.append(Turn(entry.request, min(coming, entry.prompt - 1), reserved, decode, waits))
                if waits:
                    reserved += max(1, entry.prompt - coming) + entry.output + decode
                else:
                    coming = queue_order._ALL
        job.computed = {number for number in job.computed if number >= start}
        job.shared = {number: shared for number, shared in job.shared.items() if number >= start}
        return turns


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_it_is_as_if_every_number_were_walked_over(data):
    """Requests come in any order, with gaps and equal numbers, are admitted, end, fail, and are retracted."""
    queue, defined = QueueOrder[int](), StepByStep()
    waiting: dict[int, Waiting[int]] = {}
    places: dict[int, Place] = {}
    for request in range(data.draw(st.integers(1, 25), label="steps")):
        place = Place(data.draw(st.sampled_from("ab")), data.draw(st.integers(0, 20)), data.draw(LENGTHS), 5)
        places[request] = place
        waiting[request] = Waiting(request, place, 101, data.draw(st.integers(0, 7)))
        turns = queue.arrange(list(waiting.values()))
        assert turns == defined.arrange(list(waiting.values()))
        for chosen in data.draw(st.sets(st.sampled_from(sorted(waiting))), label="admitted"):
            del waiting[chosen]
            for order in (queue, defined):
                order.admitted(chosen, places[chosen])
        assert queue.computing() == defined.computing()
        for ended in data.draw(st.lists(st.sampled_from(queue.computing() or [-1]), unique=True), label="ended"):
            how = data.draw(st.sampled_from(["cached", "failed", "retracted"]))
            if how == "retracted" and ended in places:
                waiting[ended] = Waiting(ended, places[ended], 101, 3)
                continue
            for order in (queue, defined):
                order.ended(ended, cached=how == "cached")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("far", [10**9, 10**15, 10**30])
def test_a_number_far_away_takes_no_longer_than_one_nearby(far):
    queue = QueueOrder[str]()
    near, distant = Waiting("near", Place("job", 0, 0, 1), 100), Waiting("far", Place("job", far, 80, 1), 100)
    turns = queue.arrange([distant, near])
    assert [(turn.request, turn.coming, turn.waits) for turn in turns] == [("near", 0, False), ("far", 0, False)]
    queue.admitted("near", near.place)
    queue.ended("near", cached=True)
    assert [turn.request for turn in queue.arrange([distant])] == ["far"]


def test_a_job_that_counts_down_is_not_remembered_in_full(monkeypatch):
    monkeypatch.setattr(queue_order, "_NUMBERS_KEPT", 50)
    queue = QueueOrder[int]()
    for number in range(1000, 0, -1):
        place = Place("job", number, 80, 1)
        queue.arrange([Waiting(number, place, 100)])
        queue.admitted(number, place)
        queue.ended(number, cached=True)
    assert sum(len(job.shared) + len(job.computed) for job in queue._jobs.values()) < 2 * (50 + 2)


def test_a_request_that_is_being_computed_is_never_forgotten(monkeypatch):
    monkeypatch.setattr(queue_order, "_NUMBERS_KEPT", 2)
    queue = QueueOrder[int]()
    places = [Place("job", number, 80 if number else 0, 1) for number in range(10)]
    for number in (0, 5, 6, 7, 8, 9):
        queue.admitted(number, places[number])
        if number:
            queue.ended(number, cached=True)
    for _ in range(3):
        turns = queue.arrange([Waiting(number, places[number], 100) for number in (1, 2, 3, 4)])
        assert [turn.waits for turn in turns] == [True] * 4


def test_jobs_that_have_nothing_left_are_forgotten_however_many_names_there_are():
    queue = QueueOrder[int]()
    for number in range(1000):
        place = Place(f"job {number}", 0, 0, 1)
        queue.arrange([Waiting(number, place, 100)])
        queue.admitted(number, place)
        queue.ended(number, cached=True)
    assert len(queue._jobs) <= 6


@pytest.mark.parametrize(
    "values",
    [
        7, {"job": 1, "number": 2, "shared": 3, "decode": 4}, [], ["job", 1, 2, -1], [1, 1, 2, 3], ["job", 1, 2.0, 3],
        ["job", True, 1, 1], ["job", 1 << 31, 0, 1], ["job", 10**400, 0, 1], ["job", 0, 0, float("nan")],
        ["j" * 201, 0, 0, 1], ["job", 0, 0, 1, 0, 5, 5, 1], ["job", 0, 0, 1, 0, 0, 9, 2, 1, 8, 20, 1],
        ["job", 0, 0, 1, 0, 0, 9, 0],
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused(values):
    with pytest.raises(ValueError, match="is no place in an offline job"):
        Place.decode_list(values)
