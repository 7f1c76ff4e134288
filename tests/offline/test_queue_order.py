"""A request that can use a prefix waits until that has been computed; nobody else waits for it."""

from __future__ import annotations

import pytest

from sgl_prefix_attn.offline.queue_order import Place, QueueOrder, Waiting


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


def test_once_the_prefix_is_computed_its_group_goes_first():
    queue, requests = QueueOrder[str](), job((500, 3), (400, 2))
    queue.arrange(requests)
    queue.admitted("0.0", requests[0].place)
    assert names(queue.arrange(requests[1:])) == ["1.0", "0.1", "0.2", "1.1"]
    queue.ended("0.0", cached=True)
    turns = queue.arrange(requests[1:])
    assert names(turns) == ["0.1", "0.2", "1.0", "1.1"]
    assert [turn.waits for turn in turns] == [False, False, False, True]


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
        ["job", 1, 2, -1],
        [1, 1, 2, 3],
        ["job", 1, 2.0, 3],
        ["job", True, 1, 1],
        7,
        {"job": 1, "number": 2, "shared": 3, "decode": 4},
        ["job", 1 << 31, 0, 1],
        ["job", 10**400, 0, 1],
        ["job", 0, 0, float("nan")],
        ["j" * 201, 0, 0, 1],
        ["job", 0, 0, 1, 0, 5, 5, 1],
        ["job", 0, 0, 1, 0, 0, 9, 2, 1, 8, 20, 1],
        ["job", 0, 0, 1, 0, 0, 9, 0],
    ],
)
def test_what_is_no_place_is_refused(values):
    with pytest.raises(ValueError, match="is no place in an offline job"):
        Place.decode_list(values)
