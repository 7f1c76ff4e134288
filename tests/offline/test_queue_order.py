"""A request that can use a prefix waits until that has been computed; nobody else waits for it."""

from __future__ import annotations

import pytest

from sgl_prefix_attn.offline.queue_order import Place, QueueOrder, SharedPrefix, Waiting


def job(*groups: tuple[int, int], tail: int = 10, decode: int = 5, name: str = "job") -> list[Waiting[str]]:
    """Requests of groups given as (prefix tokens, members), in running order; names are "group.member"."""
    requests = []
    for group, (prefix, members) in enumerate(groups):
        for member in range(members):
            place = Place(name, len(requests), prefix if member else 0, decode)
            requests.append(Waiting(f"{group}.{member}", place, prefix + tail))
    return requests


def names(turns) -> list[str]:
    return [turn.request for turn in turns]


def test_one_of_a_group_computes_the_prefix_the_others_wait_behind_other_groups():
    turns = QueueOrder[str]().arrange(job((500, 3), (400, 2)))
    assert names(turns) == ["0.0", "1.0", "0.1", "0.2", "1.1"]
    assert [turn.waits for turn in turns] == [False, False, True, True, True]
    assert [turn.coming for turn in turns] == [0, 0, 500, 500, 400]


def test_once_the_prefix_is_computed_its_group_goes_first():
    queue, requests = QueueOrder[str](), job((500, 3), (400, 2))
    queue.arrange(requests)
    queue.admitted("0.0", requests[0].place)
    assert names(queue.arrange(requests[1:])) == ["1.0", "0.1", "0.2", "1.1"]
    queue.ended("0.0", cached=True)
    turns = queue.arrange(requests[1:])
    assert names(turns) == ["0.1", "0.2", "1.0", "1.1"]
    assert [turn.waits for turn in turns] == [False, False, False, True]


def test_a_prefill_that_left_nothing_in_the_cache_lets_the_next_one_compute():
    queue, requests = QueueOrder[str](), job((500, 3))
    queue.admitted("0.0", requests[0].place)
    queue.ended("0.0", cached=False)
    assert [turn.waits for turn in queue.arrange(requests[1:])] == [False, True]


def test_levels_below_wait_for_their_own_prefix():
    # Two documents below one instruction: once that is computed, one request of each document goes.
    shared = [0, 300, 100, 300]
    requests = [Waiting(str(n), Place("job", n, tokens, 5), 350) for n, tokens in enumerate(shared)]
    queue = QueueOrder[str]()
    assert [(turn.request, turn.waits) for turn in queue.arrange(requests)] == [
        ("0", False),
        ("1", True),
        ("2", True),
        ("3", True),
    ]
    queue.admitted("0", requests[0].place)
    queue.ended("0", cached=True)
    assert [(turn.request, turn.waits) for turn in queue.arrange(requests[1:])] == [
        ("1", False),
        ("2", False),
        ("3", True),
    ]


def test_memory_of_the_waiting_members_is_reserved_prefix_once():
    turns = QueueOrder[str]().arrange(job((500, 3), (400, 1), tail=10, decode=5))
    leader = next(turn for turn in turns if turn.request == "1.0")
    assert leader.reserved == 2 * (10 + 5)


def test_samples_of_one_prompt_wait_for_the_first():
    place = Place("job", 0, 0, 5)
    queue = QueueOrder[str]()
    turns = queue.arrange([Waiting(name, place, 100) for name in "abc"])
    assert [(turn.request, turn.coming, turn.waits) for turn in turns] == [
        ("a", 0, False),
        ("b", 99, True),
        ("c", 99, True),
    ]
    queue.admitted("a", place)
    queue.ended("a", cached=True)
    assert not any(turn.waits for turn in queue.arrange([Waiting(name, place, 100) for name in "bc"]))


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["job", 1, 2],
        ["job", 1, 2, -1],
        [1, 1, 2, 3],
        ["job", 1, 2.0, 3],
        "abcd",
        ["job", True, 1, 1],
        ["job", 1, 2, 3, 4],
        None,
        7,
        {"job": 1, "number": 2, "shared": 3, "decode": 4},
        ["job", 1 << 31, 0, 1],
        ["job", 10**400, 0, 1],
        ["job", 0, 0, float("nan")],
        ["j" * 201, 0, 0, 1],
        ["job", 0, 0, 1, 0, 5, 5, 1],
        ["job", 0, 0, 1, 0, 5, 4, 1],
        ["job", 0, 0, 1, 0, 0, 9, 2, 1, 8, 20, 1],
        ["job", 0, 0, 1, 0, 0, 9, 0],
    ],
)
def test_what_is_no_place_is_refused(values):
    with pytest.raises(ValueError, match="is no place in an offline job"):
        Place.decode_list(values)


def test_a_place_survives_json():
    place = Place("job", 3, 20, 7, (SharedPrefix(0, 0, 40, 9), SharedPrefix(2, 40, 90, 3)))
    assert Place.decode_list(place.encode()) == place
